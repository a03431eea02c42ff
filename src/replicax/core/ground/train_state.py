"""The state of training, and whether its arrays may be used."""

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self

import jax

from replicax.core.ground.array_table import arrays_html
from replicax.core.ground.leaves import PyTree
from replicax.errors import StateError

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # for the default, which Python 3.13 has

    ModelT = TypeVar("ModelT", default=Any)
    """The type of the model that `dp.init` was given. `TrainState` alone is that of any model."""
else:
    from typing import TypeVar

    ModelT = TypeVar("ModelT")


@dataclasses.dataclass(frozen=True, eq=False)
class Uncompared:
    """A part of a pytree's structure that does not tell structures apart, and is not pickled."""

    value: Any = None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __reduce__(self) -> Any:
        return type(self), ()

    def __deepcopy__(self, _: Any) -> Self:
        return self


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *(
            "step",
            "params",
            "opt_state",
            "extras",
            "seed",
            "losses",
            "reduction",
            "scale",
            "islands",
        )
    ],
    meta_fields=["definition"],
)
@dataclasses.dataclass(frozen=True)
class TrainState(Generic[ModelT]):
    """Everything a step updates, and the random seed, as a plain pytree.

    The same tree with shapes or shardings as leaves describes a state.

    Examples:
        >>> state, metrics = dp.step(state, batch)
        >>> int(state.step), state.params["w"].shape
        (1, (3,))
    """

    step: Any
    """int32 scalar: steps done, including those whose update was skipped."""
    params: PyTree
    """Trainable arrays."""
    opt_state: PyTree
    """The optimizer state."""
    extras: PyTree
    """The model's other arrays, such as BatchNorm statistics."""
    seed: Any
    """uint32 scalar: all random numbers of the run are derived from it and the step."""
    losses: Any = ()
    """float32 `[window]` if spikes are skipped: the latest losses, newest last, the largest float
    before the first; otherwise empty. See `rx.Guard`."""
    reduction: PyTree = ()
    """State of the reduction, if it has any: leaves `[replicas, ...]`, split over the replicas."""
    scale: PyTree = ()
    """Loss scale, if the precision needs one; see `Precision`."""
    islands: PyTree = ()
    """With `rx.Rounds`, what islands have for themselves; the fields above are then what all agree
    on, `opt_state` that of the outer optimizer. See `rx.Rounds`."""
    definition: Uncompared = Uncompared()
    """The model without its arrays, by which another `DataParallel` knows the model. It is no leaf,
    neither saved nor pickled, and states of all models have the same structure around it."""

    def __repr__(self) -> str:
        leaves, params = jax.tree.leaves(self), jax.tree.leaves(self.params)
        if not all(hasattr(leaf, "dtype") for leaf in leaves):  # such as shardings
            kinds = dict.fromkeys(type(leaf).__name__ for leaf in leaves)
            return f"TrainState({len(leaves)} leaves: {', '.join(kinds)})"
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        taken = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
        count = sum(math.prod(leaf.shape) for leaf in params)
        return f"TrainState(step={_number(self.step)}, {count:,} parameters, {taken})"

    def _repr_html_(self) -> str:
        return arrays_html(repr(self), self.params, "params")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values"],
    meta_fields=["owners", "matrix_bytes", "slot_bytes"],
)
@dataclasses.dataclass(frozen=True)
class Owned:
    """Arrays `[owners * slots, ...]` of an optimizer state; an owner has slots in a row."""

    values: PyTree
    owners: int
    matrix_bytes: int
    """Size of the matrices, and of one in each slot."""
    slot_bytes: int


def owned_nodes(state: PyTree) -> list[Owned]:
    """Return the parts of a state that owners have."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Owned))
    return [node for node in nodes if isinstance(node, Owned)]


MADE_BY = {
    "params": "model",
    "extras": "model",
    "opt_state": "optimizer",
    "scale": "precision",
    "reduction": "reduction",
    "islands": "islands",
    "losses": "guard",
}
"""Fields of a state, and what they depend on, the most telling one first."""

Metrics = dict[str, Any]


def _number(step: Any) -> str:
    """Return `step` if it is available now, otherwise a question mark."""
    try:
        return str(int(step)) if step.is_ready() else "?"
    except Exception:  # a shape, a tracer, or donated to a later step
        return "?"


def check_outside_jit(tree: Any) -> None:
    """Raise `StateError` if `tree` contains tracers of `jax.jit` or `jax.grad`."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise StateError(
            "a method of a DataParallel was called inside jax.jit or another transformation, which "
            "only dp.step can be a part of: call it outside"
        )


def check_unused(tree: Any) -> None:
    """Raise `StateError` if an array in a state or model has been donated."""
    # jax 0.10 does not raise for donated arrays on several devices: the process crashes.
    if was_donated(tree):
        raise StateError(
            "this state or model has arrays that were donated to an earlier step: write state, "
            "metrics = dp.step(state, batch), dp.model without copy=False, or "
            "DataParallel(donate=False)"
        )


def was_donated(tree: Any) -> bool:
    """Whether an array in a state or model has been donated."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return any(not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted() for leaf in arrays)
