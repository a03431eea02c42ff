"""A step as a program that another process can compile, without the code it was made of."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params

from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import AnyMesh, mesh_of
from replicax.core.modes import MODES
from replicax.core.objective import LossFunction
from replicax.core.scaling import LOSS_SCALE, OVERFLOWS
from replicax.core.traced_for import traced_for
from replicax.errors import ConfigError, require
from replicax.plan.operations import with_equations
from replicax.train.guarded import NOT_FINITE

CUDNN_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
"""Kernels that a model may ask for by name. JAX does not promise to keep them for exported
programs of later versions; ours is compiled at once, by the same version."""


_REASONS = (
    "host_callbacks",
    "is different from the lowering platform",
    "require devices to be present",
)
"""Parts of what jax.export says of a step whose kernels need Python or devices to be lowered."""
PER_REPLICA = next(mode for mode in MODES.values() if mode.per_replica)
"""Mode that a step of the whole batch is exported in where its own cannot be."""
BEFORE_CUDNN = 7.5
"""The newest compute capability of GPUs whose attention cuDNN does not compute: Turing's."""
WITHOUT_CUDNN = "planned without the kernels of cuDNN: the step may need less"


@dataclasses.dataclass(frozen=True)
class ExportedStep:
    """A step for some number of devices of one platform."""

    module: bytes
    """Module as `jax.export` serialises it, with flat arguments and results."""
    donated: int
    """How many of the arguments, from the first on, give their memory to the results."""
    sizes: Mapping[str, int]
    """Devices by mesh axis."""
    metrics: int
    """Means that the step reduces, the loss among them."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the compiler, by name."""
    notes: tuple[str, ...] = ()
    """Where it is not the very step that was asked for."""


def export_step(
    dp: DataParallel, model: Any, batch: Any, platform: str, capability: float | None
) -> ExportedStep:
    """Return the step of `dp` on devices of a platform: `cpu`, `cuda` or `tpu`.

    `capability` is CUDA's compute capability of the devices, which need not exist; `model` and
    `batch` are arrays or their shapes.

    Kernels of cuDNN are exported from per-replica modes alone: others have their compiler call back
    for how to split them. There the same step is exported as `PER_REPLICA`; a layout that this
    cannot hold is exported without these kernels. `ExportedStep.notes` says so.

    Raises:
        ConfigError: a step that calls back to the host.
        MissingDependencyError: no flatbuffers.
    """
    require("flatbuffers", "cli")
    for form, described, notes in _forms(dp, capability):
        try:
            return _export(form, model, batch, platform, described, notes)
        except (NotImplementedError, ValueError) as error:
            if not any(reason in str(error) for reason in _REASONS):
                raise
    raise ConfigError(
        "the step calls back to the host (jax.debug.print, say), which a program for other "
        "hardware cannot: take the callback out to plan it"
    )


def step_jaxpr(dp: DataParallel, model: Any, batch: Any) -> Jaxpr:
    """Return what the step computes on all devices; arguments as of `export_step`."""
    equal, *_ = next(_forms(dp, None))
    with traced_for(None):
        jaxpr: Jaxpr = equal.trace(model, batch, mesh=_mesh(equal.mesh)).jaxpr.jaxpr
    return jaxpr


def _forms(
    dp: DataParallel, capability: float | None
) -> Iterator[tuple[DataParallel, float | None, tuple[str, ...]]]:
    """Yield what may be exported for `dp`, from the nearest on: the step, its capability, notes."""
    notes: tuple[str, ...] = ()
    if dp.mode.most_processes is not None:  # it knows attached devices alone
        notes = (f"mode {dp.mode} is planned as {dp.mode.instead}, its equal",)
        dp = dp.replace(mode=dp.mode.instead)
    yield dp, capability, notes
    if not dp.mode.per_replica:
        note = f"mode {dp.mode} is planned as {PER_REPLICA}, since the step has kernels of cuDNN"
        try:
            form = dp.replace(mode=PER_REPLICA)
        except ConfigError:  # it cannot hold this layout, or this mesh
            pass
        else:
            yield form, capability, (*notes, note)
    if capability is not None:
        yield dp, min(capability, BEFORE_CUDNN), (*notes, WITHOUT_CUDNN)


def _export(
    dp: DataParallel,
    model: Any,
    batch: Any,
    platform: str,
    capability: float | None,
    notes: tuple[str, ...],
) -> ExportedStep:
    with traced_for(capability):
        made = dp.program(model, mesh=_mesh(dp.mesh))
        arguments = state, _ = made.shapes, made.described(batch)
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CUDNN_CALLS]
        exported = jax.export.export(made.step, platforms=[platform], disabled_checks=allowed)(
            *arguments
        )
        options = dp.configuration.options(dp.mesh)
    _, metrics = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return ExportedStep(
        module=bytes(_flat(exported, len(jax.tree.leaves(arguments))).serialize()),
        donated=len(jax.tree.leaves(state)) if dp.donate else 0,
        sizes=dict(dp.mesh.shape),
        metrics=len(metrics.keys() - {NOT_FINITE, LOSS_SCALE, OVERFLOWS}),
        options=options,
        notes=notes,
    )


def _mesh(mesh: AnyMesh) -> AnyMesh:
    """Mesh of host devices, if there are as many: some kernels need devices to be lowered."""
    try:
        host = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves them out
        host = []
    return mesh_of(host[: mesh.size], mesh.shape) if len(host) >= mesh.size else mesh


def _flat(exported: jax.export.Exported, arguments: int) -> jax.export.Exported:
    """`exported` with tuples for the trees of its arguments and results, whose types the process
    that compiles it need not know.
    """
    return dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((0,) * arguments, {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )


def keeping_everything(loss: LossFunction) -> LossFunction:
    """Return `loss`, but each `jax.checkpoint` in it keeps all that its backward pass needs."""

    def keeping(equation: JaxprEqn) -> JaxprEqn:
        if not _is_checkpoint(equation):
            return equation
        policy = jax.checkpoint_policies.everything_saveable
        replaced: JaxprEqn = equation.replace(params={**equation.params, "policy": policy})
        return replaced

    def kept(model: Any, batch: Any, key: jax.Array | None) -> Any:
        def of_batch(batch: Any, key: jax.Array | None) -> Any:
            return loss(model, batch, key)

        traced, shapes = jax.make_jaxpr(of_batch, return_shape=True)(batch, key)
        found = jaxpr_as_fun(with_equations(traced, keeping))(*jax.tree.leaves((batch, key)))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return kept


def computes_again(jaxpr: Jaxpr) -> bool:
    """Whether there is a `jax.checkpoint` in it."""
    return any(
        _is_checkpoint(eqn) or any(map(computes_again, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _is_checkpoint(eqn: JaxprEqn) -> bool:
    return {"policy", "prevent_cse"} <= eqn.params.keys()
