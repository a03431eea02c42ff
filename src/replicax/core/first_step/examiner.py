"""Trace a loss or a custom step so that its rows can be followed.

The trace is that of one device, without gradients. Functions of the names in
`replicax.core.jaxprs.row_dependence` mark the values whose mean is taken, the rows that are
gathered, and sums over all replicas.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.custom.known_gradient import BACKWARD, FORWARD
from replicax.core.data.batch import Batch
from replicax.core.data.merged import Merged
from replicax.core.data.per_row import ByRow
from replicax.core.ground.leaves import PyTree, is_random_key
from replicax.core.ground.precision import to_sum
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.jaxpr import shapes_of
from replicax.core.jaxprs.row_inner import called_by
from replicax.core.jaxprs.row_labels import ENTERED, GATHERED, KEYED, LEFT, SEEN
from replicax.core.models.definition import CallContext
from replicax.core.step.base import StepSums
from replicax.core.step.loss import (
    LOSS,
    Weighted,
    has_weights,
    merged_of,
    rows_of,
    sums,
    values_by_name,
)
from replicax.core.step.loss_context import LossContext, weighs
from replicax.core.step.objective import Objective, only_read, restored
from replicax.errors import LossError

LossRun = Callable[[TrainState, Batch, "RowExaminer"], tuple[PyTree, jax.Array | None]]
"""Computes a loss or a step, calling the examiner: what must not depend on rows, and the loss."""

GATHER = "rx.gather"
"""Name, for errors, of rows that are gathered."""
AXIS = "replicax_examined"
"""An axis of size 1 over which BatchNorm averages its statistics, so that they are recognised."""


@dataclasses.dataclass
class RowExaminer:
    """Records what a loss or a step computes while it is traced."""

    gathered: int
    """Number of rows that `rx.gather` returns."""
    number: int = 0
    """Which set of a batch is examined, as in `Batch.number`; the rows of others are constants."""
    entered: int | None = None
    """Number of rows of a loss in a custom step; None for those that it is given."""
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names, for errors, of the values whose mean is taken, by label."""
    scalars: set[str] = dataclasses.field(default_factory=set)
    """Labels of values that are one number for the whole batch."""
    apart: set[str] = dataclasses.field(default_factory=set)
    """Labels of values that belong to rows of another set, which no trial divides."""
    merged: set[str] = dataclasses.field(default_factory=set)
    """Labels of arrays of metrics that are merged, and so are those of all rows of a batch."""
    gathers: bool = False
    weighs: bool = False
    """Whether a loss or the step called `rx.gather`, or `rx.row_weights`."""
    learns: bool = False
    """Whether the losses are differentiated, so that their weights must be constants."""
    divides: bool = False
    """Whether a loss that is differentiated returns an `rx.Weighted`, whose sum divides after."""
    whole: bool = False
    """Whether it will see the global batch, as in `CallContext.whole`."""
    returns_rows: bool = False
    """Whether a loss or the step returns an `rx.ByRow` among its metrics."""
    merges: bool = False
    """Whether it returns a metric that is no mean."""

    @property
    def losses(self) -> set[str]:
        """Labels of what is differentiated: values of losses."""
        return {label for label, name in self.names.items() if self.learns and name == LOSS}

    def step_sums(
        self,
        objective: Objective,
        params: PyTree,
        extras: PyTree,
        rows: Batch,
        context: CallContext,
    ) -> tuple[StepSums, PyTree]:
        """Return what `objective.step_sums` does, with zeros for the gradient."""
        examined, count = rows.number == self.number, rows.size
        rows = rows.map_rows(self._enter) if examined else rows

        def observed(model: Any, data: PyTree, key: jax.Array | None) -> Any:
            values = objective.loss(model, data, key)
            self.weighs |= weighs()
            return values

        watched = dataclasses.replace(objective, loss=observed)
        gather = self.gather if examined else _itself
        key = context.key
        context = dataclasses.replace(
            context,
            key=key if key is None else _call(KEYED, _itself, key),
            axis=AXIS,
            gather=gather,
            row_numbers=lambda _: rows.index,
            only_read=True,
            whole=self.whole,
        )
        returned, after = watched.returned(params, extras, rows, context)
        weighted = sums(returned, rows.mask)
        self.divides |= self.learns and isinstance(values_by_name(returned)[LOSS], Weighted)
        if self.learns and has_weights(returned):
            names = dict(self.names)  # what is gathered again belongs to another trace
            self._check_weights(
                objective,
                params,
                lambda given: watched.returned(given, extras, rows, context),
            )
            self.names = names
        merged = merged_of(returned, rows.mask)
        for name, value in values_by_name(returned).items():
            before = len(self.names)
            if name in merged:
                self.see_merged(name, merged[name])
            else:
                self.see(name, value)
            self.apart.update(() if examined else [*self.names][before:])
        by_row = rows_of(returned, rows.size, every=objective.every_row)
        zeros = jax.tree.map(_zeros, params)
        if examined:
            by_row = jax.tree.map(partial(_call, LEFT, partial(_resized, count=count)), by_row)
        return StepSums(zeros, weighted, by_row, merged), after

    @staticmethod
    def _check_weights(
        objective: Objective, params: PyTree, of: Callable[[PyTree], tuple[Any, PyTree]]
    ) -> None:
        """Raise `LossError` if weights have a derivative by parameters that train."""

        def total(wanted: PyTree) -> jax.Array:
            returned, _ = of(restored(wanted, params, objective.read))
            return jnp.sum(values_by_name(returned)[LOSS].weights)

        traced = jax.make_jaxpr(total, axis_env=[(AXIS, 1)])(only_read(params, objective.read))
        if any(with_gradient(traced, len(traced.in_avals))):
            raise LossError(
                "the weights of the loss depend on the parameters, and rx.Weighted takes weights "
                "as constants, with no gradient: pass jax.lax.stop_gradient(weights), or return "
                "values * weights / rx.gather(weights).mean() to differentiate them"
            )

    def see(self, name: str, value: Any) -> None:
        """Mark the values, and weights, of a mean, or rows that are returned."""
        self.returns_rows |= isinstance(value, ByRow)
        for each in jax.tree.leaves(value):
            each = jax.random.key_data(each) if is_random_key(each) else each
            array = jax.lax.stop_gradient(to_sum(jnp.asarray(each)))
            label = f"{SEEN}{len(self.names)}"
            self.names[label] = name
            if not array.ndim:
                self.scalars.add(label)
            _call(label, _itself if not array.ndim else _with_sum, array)

    def see_merged(self, name: str, merged: Merged) -> None:
        """Mark the arrays of a metric that is no mean."""
        self.merges = True
        for leaf, by_row in zip(merged.leaves, merged.kind.by_row, strict=True):
            if by_row:
                self.see(name, leaf[0])
                continue
            label = f"{SEEN}{len(self.names)}"
            self.names[label] = name
            self.merged.add(label)
            _call(label, _itself, jax.lax.stop_gradient(to_sum(leaf[0])))

    def gather(self, rows: list[jax.Array]) -> list[jax.Array]:
        """Return as many rows as the global batch has, whatever the number of `rows`.

        Each array by itself, unlike where it runs: what is known of one is not of the others.
        """
        self.gathers = True
        self.see(GATHER, rows)
        return [_call(GATHERED, partial(_resized, count=self.gathered), each) for each in rows]

    def step(self, here: LossContext) -> None:
        """Record which functions a custom step itself called."""
        self.weighs |= here.weighs

    def _enter(self, leaf: jax.Array) -> Any:
        return _call(ENTERED, partial(_resized, count=self.entered or len(leaf)), leaf)


def _call(label: str, function: Callable[[jax.Array], Any], array: jax.Array) -> Any:
    def named_function(array: jax.Array) -> Any:
        return function(array)

    named_function.__name__ = label
    return jax.jit(named_function)(array)


def _resized(array: jax.Array, count: int) -> jax.Array:
    """Return `count` rows; not `array` itself, which a derivative would use without this call."""
    if len(array) != count:
        array = jnp.resize(array, (count, *array.shape[1:]))
    found: jax.Array = jax.lax.optimization_barrier(array)
    return found


def _zeros(leaf: jax.Array) -> jax.Array:
    """Return the gradient of a leaf; a custom step's state, in evaluation, may have random keys."""
    return leaf if is_random_key(leaf) else jnp.zeros_like(to_sum(leaf))


def _itself(array: Any) -> Any:
    return array


def _with_sum(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `array` and its sum over rows; see `replicax.core.jaxprs.row_labels.row_dim`."""
    return array, jnp.sum(array, axis=0)


def of_loss(objective: Objective, key_of: Callable[[TrainState], jax.Array | None]) -> LossRun:
    """Return a loss, in training or in evaluation, to be examined."""

    def run(state: TrainState, batch: Batch, examiner: RowExaminer) -> tuple[PyTree, jax.Array]:
        context = CallContext(key_of(state), step=state.step)
        total, after = examiner.step_sums(objective, state.params, state.extras, batch, context)
        writes = getattr(objective.definition, "writes", False)
        return {"state": after if writes else ()}, total.weighted[LOSS].total

    return run


@dataclasses.dataclass(frozen=True)
class Trace:
    """A loss or a step, traced with some number of rows."""

    jaxpr: ClosedJaxpr
    examiner: RowExaminer
    outputs: tuple[str, ...]
    """Paths of the results that must not depend on rows; the loss may follow them."""
    numbers: tuple[str, ...]
    """Paths of those that are one number."""


def trace(run: LossRun, state: TrainState, batch: Batch, rows: int, examiner: RowExaminer) -> Trace:
    """Trace `run` as for one device with a batch of so many `rows`."""
    state, batch = jax.eval_shape(lambda *given: given, state, batch)
    sized = batch.map_rows(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype))
    with jax.default_matmul_precision("highest"):
        make = jax.make_jaxpr(
            lambda state, batch: run(state, batch, examiner),
            axis_env=[(AXIS, 1)],
            return_shape=True,
        )
        jaxpr, (shapes, _) = make(state, sized)
    _check_reverse(jaxpr)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    numbers = [name for name, leaf in found.items() if not (leaf.shape or is_random_key(leaf))]
    return Trace(jaxpr, examiner, tuple(found), tuple(numbers))


def with_gradient(traced: ClosedJaxpr, count: int) -> list[bool]:
    """Return by which of the first `count` inputs the last output has a nonzero derivative."""
    shapes = shapes_of(traced.jaxpr.invars)
    moved = [i for i in range(count) if jnp.issubdtype(shapes[i].dtype, jnp.inexact)]

    def derivative(values: list[Any], tangents: list[Any]) -> Any:
        def last(*own: Any) -> Any:
            known = dict(enumerate(values)) | dict(zip(moved, own, strict=True))
            return jaxpr_as_fun(traced)(*known.values())[-1]

        return jax.jvp(last, tuple(values[i] for i in moved), tuple(tangents))[1]

    make = jax.make_jaxpr(derivative, axis_env=[(AXIS, 1)])
    jaxpr = make(shapes, [shapes[i] for i in moved]).jaxpr
    used = dict(zip(moved, dce_jaxpr(jaxpr, [True])[1][len(shapes) :], strict=True))
    return [used.get(i, False) for i in range(count)]


def _check_reverse(traced: ClosedJaxpr) -> None:
    """Raise `LossError` if something with a backward pass alone is differentiated forward.

    JAX raises a `TypeError` when it compiles that, which does not tell of what.
    """
    if not any(_forward(traced.jaxpr)):
        return
    used, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    for name in _forward(used):
        raise LossError(
            FORWARD
            if name == BACKWARD
            else "a forward-mode derivative (jax.jvp, jacfwd, linearize) was taken of a function "
            f"with the backward pass {name} (jax.custom_vjp), which has no other derivative: use "
            "jax.grad or jax.vjp there, or define the function with jax.custom_jvp"
        )


def _forward(jaxpr: Any) -> Iterator[str]:
    """Yield the names of backward passes of what is differentiated forward."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_lin":
            yield getattr(eqn.params["bwd"], "__name__", "")
        for inner in called_by(eqn, ruled=False):
            yield from _forward(inner)
