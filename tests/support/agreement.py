"""A case, trained in some way, agrees with one device leaf by leaf: `agrees(case, how)`."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.cases import Case

import replicax as rx
from replicax.core.ground.job import Job
from replicax.core.modes.exact.exact_mode import MICRO_SHARDS
from replicax.train.files.fingerprint import sha256
from replicax.verify.simulated_islands import SimulatedIslands

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05, momentum=0.9),
    "slow": lambda: optax.sgd(0.02, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.01),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), OPTIMIZERS["adamw"]()),
}


@dataclasses.dataclass(frozen=True)
class How:
    """A way to train a case."""

    mode: str
    layout: str = "replicated"
    axes: tuple[tuple[str, int], ...] = ()
    schedule: str = "1f1b"
    accumulate: int = 1
    optimizer: str = "adamw"
    reduction: Any = "float32"
    islands: int = 0
    """Simulated islands that exchange parts."""
    micro_shards: int = MICRO_SHARDS
    precision: str = "float32"
    rounds: rx.Rounds | None = None

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name, size in self.axes]
        rest = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)[3:]
            if getattr(self, field.name) != field.default
        ]
        return "-".join([self.mode, self.layout, *sizes, *rest])

    @property
    def alone(self) -> "How":
        """The same in mode `single`."""
        return How("single", accumulate=self.accumulate, optimizer=self.optimizer)

    @property
    def undivided(self) -> "How":
        """The same in its own mode, on one device."""
        return dataclasses.replace(self, axes=(("data", 1),), accumulate=1, islands=0)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return dict(self.axes).get("stage", 1)


def on(mode: str, layout: str = "replicated", schedule: str = "1f1b", /, **more: Any) -> How:
    """Return a way to train on a mesh with axes of these sizes; `more` has other fields, too."""
    others = {field.name for field in dataclasses.fields(How)}
    fields = {name: more.pop(name) for name in list(more) if name in others}
    return How(mode, layout, tuple(more.items()), schedule, **fields)


def record_gradient() -> optax.GradientTransformation:
    """Keeps the newest gradient in its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradient, _state, _params=None: (gradient, gradient),
    )


def data_parallel(case: Case, how: How, job: Job | None = None) -> rx.DataParallel:
    """Return the step of a case; a job runs it on all its devices."""
    sizes = dict(how.axes)
    devices = jax.devices()[: math.prod(sizes.values())]
    by_rules = any(name in ("model", "stage") for name in sizes)  # other axes need no rules
    rules = [*case.rules, ("", P())] if by_rules else ()
    optimizer = optax.chain(record_gradient(), OPTIMIZERS[how.optimizer]())
    return rx.DataParallel(
        case.loss,
        optimizer if case.step is None else None,
        step=case.step,
        mesh=rx.make_mesh(**sizes, devices=None if job else devices),
        mode=how.mode,
        layout=rx.layout(how.layout, rules=rules, schedule=how.schedule),
        accumulate=how.accumulate,
        micro_shards=how.micro_shards,
        precision=how.precision,
        reduction=how.reduction,
        rounds=how.rounds,
        job=SimulatedIslands(how.islands) if how.islands else job,
    )


class Trained:
    """A trained case."""

    def __init__(self, case: Case, how: How, job: Job | None = None) -> None:
        self._case, self.dp = case, data_parallel(case, how, job)
        model, dp = case.model(), self.dp
        self.state = dp.init(in_float64(model) if jax.config.jax_enable_x64 else model)
        self.told: list[Any] = []
        """Metrics by step."""
        for epoch in range(case.epochs):
            for batch in dp.feed(case.source, case.batch, shuffle=True, epoch=epoch):
                self.state, metrics = dp.step(self.state, batch)
                if not self.told and case.step is None and how.rounds is None:
                    self.gradient = self._whole(self.state.opt_state[0])
                self.told.append(self._whole(metrics))
        self.first, self.last = self.told[0], self.told[-1]
        self.params, self.extras = self._whole(self.state.params), without_keys(self.state.extras)

    @functools.cached_property
    def evaluated(self) -> dict[str, float]:
        """Metrics of an evaluation."""
        return self.dp.evaluate(self.state, self.dp.feed(self._case.source, self._case.batch))

    @functools.cached_property
    def opt_state(self) -> Any:
        """The state of the optimizer."""
        return self._whole(self.state.opt_state)

    @functools.cached_property
    def bits(self) -> dict[str, Any]:
        """Digests of the state and of all metrics, and an evaluation."""
        evaluated = self.evaluated if self._case.step is None else {}
        return {"state": sha256(self.state), "told": sha256(self.told), "evaluated": evaluated}

    def parts(self, *names: str) -> dict[str, Any]:
        """Return the attributes of these names."""
        return {name: getattr(self, name) for name in names}

    def _whole(self, tree: Any) -> Any:
        """Return it on the host, and read-only: whoever asks for a reference gets the same one."""
        if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
            everywhere = NamedSharding(self.dp.mesh, P())
            tree = jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
        found = jax.tree.map(np.asarray, jax.device_get(tree))
        jax.tree.map(lambda leaf: leaf.setflags(write=False), found)
        return found


@functools.cache
def _reference(case: Case, how: How, float64: bool) -> Trained:
    return Trained(case, how)


def reference(case: Case, how: How) -> Trained:
    """Return a case trained on one device, as often as a process asks."""
    return _reference(case, how, bool(jax.config.jax_enable_x64))


def agrees(
    case: Case,
    how: How,
    bounds: Mapping[str, float],
    absolute: tuple[str, ...] = (),
    wanted: How | None = None,
) -> Trained:
    """Train, and compare the parts that have bounds with those of one device, or of `wanted`.

    A difference is relative to the largest value of its leaf, but for `absolute` parts.
    """
    found, other = Trained(case, how), reference(case, wanted or how.alone)
    assert_agree(found.parts(*bounds), other.parts(*bounds), bounds, absolute)
    return found


def has_the_bits_of_one_device(case: Case, how: How, wanted: How | None = None) -> None:
    """Train, and compare all bits with those of one device in the same mode, or of `wanted`."""
    assert Trained(case, how).bits == reference(case, wanted or how.undivided).bits


def assert_agree(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    bounds: Mapping[str, float],
    absolute: tuple[str, ...] = (),
) -> None:
    """Compare the parts that have bounds."""
    for part, bound in bounds.items():
        difference, path = largest_difference(
            found[part], wanted[part], relative=part not in absolute
        )
        assert difference <= bound, f"{part}{path} differs by {difference:.1e}"


def in_float64(model: Any) -> Any:
    """Return a model with its floats widened."""

    def widened(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, jnp.float64) if floating else leaf

    if not isinstance(model, nnx.Module):
        return jax.tree.map(widened, model)
    nnx.update(model, jax.tree.map(widened, nnx.state(model)))
    return model


def without_keys(extras: Any) -> list[np.ndarray]:
    """Return the leaves of a model's other arrays that are no random keys."""
    return [
        np.asarray(leaf)
        for leaf in jax.tree.leaves(extras)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def largest_difference(tree: Any, reference: Any, *, relative: bool = True) -> tuple[float, str]:
    """Over all leaves: the largest difference, over the largest value if relative, and where."""
    worst = (0.0, "")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), expected in zip(leaves, jax.tree.leaves(reference), strict=True):
        leaf, expected = np.asarray(leaf, np.float64), np.asarray(expected, np.float64)
        assert np.isfinite(leaf).all()
        scale = (np.abs(expected).max() or 1.0) if relative else 1.0
        worst = max(worst, (np.abs(leaf - expected).max() / scale, jax.tree_util.keystr(path)))
    return worst
