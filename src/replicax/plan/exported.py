"""Export a step as a program that another process can compile without the user's code."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params

from replicax.core.data_parallel import DataParallel
from replicax.core.ground.traced_for import traced_for
from replicax.core.modes.mode_table import MODES
from replicax.core.placement.mesh import AnyMesh, mesh_of
from replicax.core.step.loss_scale import LOSS_SCALE, OVERFLOWS
from replicax.core.step.objective import LossFunction
from replicax.errors import ConfigError, require
from replicax.plan.operations import with_equations
from replicax.train.guarded import NOT_FINITE

FLASH3_CALLS = ("dew_flash3_mha_fwd", "dew_flash3_mha_bwd")
ATTENTION_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", *FLASH3_CALLS)
"""Kernels that a model may call by name. JAX gives no compatibility guarantee for them in exported
programs, but these programs are compiled immediately, by the same version."""


_REASONS = (
    "host_callbacks",
    "is different from the lowering platform",
    "require devices to be present",
)
"""Fragments of jax.export errors for steps whose kernels need Python or devices to be lowered."""
PER_REPLICA = next(mode for mode in MODES.values() if mode.per_replica)
"""Mode used to export a whole-batch step that cannot be exported in its own mode."""
BEFORE_CUDNN = 7.5
"""The highest compute capability without cuDNN attention: Turing."""
WITHOUT_CUDNN = "planned without cuDNN kernels: the step may need less memory"


@dataclasses.dataclass(frozen=True)
class ExportedStep:
    """A step exported for a number of devices of one platform."""

    module: bytes
    """Module serialized by `jax.export`, with flat arguments and results."""
    donated: int
    """Number of leading arguments that are donated."""
    sizes: Mapping[str, int]
    """Devices by mesh axis."""
    metrics: int
    """Number of metrics that the step reduces, including the loss."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Compiler options by name."""
    notes: tuple[str, ...] = ()
    """Differences from the requested step."""


def export_step(
    dp: DataParallel, model: Any, batch: Any, platform: str, capability: float | None
) -> ExportedStep:
    """Export the step of `dp` for devices of a platform: `cpu`, `cuda` or `tpu`.

    `capability` is the CUDA compute capability of the devices, which need not be attached; `model`
    and `batch` are arrays or their shapes.

    cuDNN kernels can be exported only from per-replica modes: in other modes the compiler calls
    back to partition them. Those steps are exported as `PER_REPLICA`, or without cuDNN kernels if
    that mode does not support the layout. `ExportedStep.notes` says so.

    Raises:
        ConfigError: the step calls back to the host.
        MissingDependencyError: flatbuffers is not installed.
    """
    require("flatbuffers", "cli")
    for form, described, notes in _forms(dp, capability):
        try:
            return _export(form, model, batch, platform, described, notes)
        except (NotImplementedError, ValueError) as error:
            if not any(reason in str(error) for reason in _REASONS):
                raise
    raise ConfigError(
        "the step calls back to the host (as jax.debug.print does), which a program exported for "
        "other hardware cannot do: remove the callback to plan it"
    )


def step_jaxpr(dp: DataParallel, model: Any, batch: Any) -> Jaxpr:
    """Return the jaxpr of the step on all devices; arguments as for `export_step`."""
    equal, *_ = next(_forms(dp, None))
    with traced_for(None):
        jaxpr: Jaxpr = equal.trace(model, batch, mesh=_mesh(equal.mesh)).jaxpr.jaxpr
    return jaxpr


def _forms(
    dp: DataParallel, capability: float | None
) -> Iterator[tuple[DataParallel, float | None, tuple[str, ...]]]:
    """Yield forms of `dp` to export, closest first: the step, its capability, notes."""
    notes: tuple[str, ...] = ()
    if dp.mode.analysed:
        notes = (f"mode {dp.mode}: these are figures of the step {dp.mode.analysed}",)
    if dp.mode.most_processes is not None:  # it supports attached devices only
        notes = (f"mode {dp.mode} is planned as {dp.mode.instead}, which is equivalent",)
        dp = dp.replace(mode=dp.mode.instead)
    yield dp, capability, notes
    if not dp.mode.per_replica:
        note = f"mode {dp.mode} is planned as {PER_REPLICA}, since the step has cuDNN kernels"
        try:
            form = dp.replace(mode=PER_REPLICA)
        except ConfigError:  # it does not support this layout or mesh
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
        arguments = state, _ = made.shapes, made.batches.described(batch)
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ATTENTION_CALLS]
        exported = jax.export.export(made.step, platforms=[platform], disabled_checks=allowed)(
            *arguments
        )
        options = dp.configuration.chosen_options(dp.mesh)
    _, metrics, _ = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return ExportedStep(
        module=bytes(_flat(exported, len(jax.tree.leaves(arguments))).serialize()),
        donated=len(jax.tree.leaves(state)) if dp.donate else 0,
        sizes=dict(dp.mesh.shape),
        metrics=len(metrics.keys() - {NOT_FINITE, LOSS_SCALE, OVERFLOWS}),
        options=options,
        notes=notes,
    )


def _mesh(mesh: AnyMesh) -> AnyMesh:
    """Return a mesh of CPU devices if there are enough: some kernels need devices to be lowered."""
    try:
        host = jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        host = []
    return mesh_of(host[: mesh.size], mesh.shape) if len(host) >= mesh.size else mesh


def _flat(exported: jax.export.Exported, arguments: int) -> jax.export.Exported:
    """Return `exported` with flat argument and result trees, free of user-defined types."""
    return dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((0,) * arguments, {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )


def keeping_everything(loss: LossFunction) -> LossFunction:
    """Return `loss` with every `jax.checkpoint` in it saving all residuals."""

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
    """Whether the jaxpr contains a `jax.checkpoint`."""
    return any(
        _is_checkpoint(eqn) or any(map(computes_again, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _is_checkpoint(eqn: JaxprEqn) -> bool:
    return {"policy", "prevent_cse"} <= eqn.params.keys()
