"""Examine a loss, or a custom step, before it first runs.

Determine its outputs, whether its rows are independent, and what depends on one replica's rows.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from replicax.core.accumulate import Sequential
from replicax.core.batch import Batch
from replicax.core.inside import Inside, weighs
from replicax.core.loss import LOSS, arrays_of_loss, scalars, sums
from replicax.core.models.definition import PyTree, View
from replicax.core.models.stateful import values_of
from replicax.core.objective import Objective
from replicax.core.own import keep
from replicax.core.reduction import as_they_are
from replicax.core.row_rules import MIXED, Place, Rows
from replicax.core.rows import follow, gathers, holds_number, moves, numbers_places
from replicax.core.update import TrainState
from replicax.errors import LossError

_UNITS = 512
"""Maximum rounding difference between two values of one row, in units of eps."""
_COARSEST = 0.1
"""Upper bound on that difference for any dtype, as a share of the largest value."""


class Look:
    """Examine the loss of `objective` on the first step's state and batch.

    Whether rows depend on each other often follows from the training trace, or else from the
    evaluation trace, where BatchNorm averages nothing. Otherwise the loss is computed on two
    quarters of the rows, separately and together (as many rows as one forward pass), here or, if
    `compute` is False, by `decide`. A loss that cannot be computed this way is trusted. If the
    batch is not `divided`, all rows are computed together, and scalars need no examination.
    Raises `LossError` if the loss violates its contract.
    """

    def __init__(
        self,
        objective: Objective,
        state: TrainState,
        batch: Batch,
        *,
        divided: bool,
        compute: bool = True,
    ) -> None:
        self.rows_meet = False
        """Whether a row's loss depends on other rows, apart from gathered ones."""
        self.unsure = False
        """Whether the traces are inconclusive and `decide` must be called."""
        self._objective, self._of = objective, (state, batch)
        self._writes = getattr(objective.definition, "writes", False)
        # Names of outputs that are scalars for the whole batch, and whether it reads row weights.
        traced, (self.scalars, self.weighs) = self._trace(jax.random.key(0))
        self.moves = moves(traced, len(jax.tree.leaves(state.params)))
        """Whether it has a gradient that is not identically 0."""
        self.gathers = gathers(traced)
        values, written = self._places(traced)
        self.writes_alone = any(written)
        """Whether the state it writes to a `Stateful` model depends on the visible rows."""
        apart = self.gathers or self._apart(traced, values)
        if not apart and self._writes and divided:
            self.rows_meet = True  # possibly statistics of visible rows: evaluation has none
        elif not apart and (divided or LOSS not in self.scalars):
            with contextlib.suppress(Exception):  # the user's loss, in evaluation
                traced = self._trace(None)[0]
                self.unsure = not self._apart(traced, self._places(traced)[0])
        del self._of  # do not keep the arrays alive
        if self.unsure and compute:
            self.decide(jax.jit(self.differences)(state, batch))

    @property
    def needs_real_rows(self) -> bool:
        """Whether padding rows would change the loss, as it does not read their mask."""
        depends = bool(self.scalars) or self.gathers or self.rows_meet
        return depends and not self.weighs

    def _trace(self, key: jax.Array | None) -> tuple[ClosedJaxpr, tuple[tuple[str, ...], bool]]:
        """Trace the loss; also find which outputs are scalars, and whether it reads row weights."""
        found: list[tuple[tuple[str, ...], bool]] = []

        def observed(model: Any, data: PyTree, key: jax.Array | None) -> Any:
            returned = self._objective.loss(model, data, key)
            found.append((scalars(values_of(returned)), weighs()))
            return returned

        def values(params: PyTree, extras: PyTree, batch: Batch) -> tuple[Any, Any]:
            view = View(key, step=jnp.int32(0))
            returned, after = watching.returned(params, extras, batch, view)
            sums(returned, batch.mask)  # raises for invalid returns
            return arrays_of_loss(returned), after if self._writes else ()

        watching = dataclasses.replace(self._objective, loss=observed)
        state, batch = self._of
        return jax.make_jaxpr(values)(state.params, state.extras, batch), found[0]

    def _places(self, traced: ClosedJaxpr) -> tuple[list[Place], list[Place]]:
        """Return where rows are in the loss's values, and in the state it writes."""
        state, batch = self._of
        inputs = places_of(batch, Rows(0))
        held = [None] * (len(traced.jaxpr.invars) - len(inputs))
        places = follow(traced, [*held, *inputs])
        values = len(places) - len(jax.tree.leaves(state.extras)) * self._writes
        return places[:values], places[values:]

    def _apart(self, traced: ClosedJaxpr, values: list[Place]) -> bool:
        """Whether a trace of the loss shows that each row's loss depends on that row alone.

        It may not depend on the number of rows or on the row's position either.
        """
        size = self._of[1].size
        apart = all(each in (None, Rows(0)) for each in values)
        return apart and not (holds_number(traced, _counts(size)) or numbers_places(traced, size))

    def differences(self, state: TrainState, batch: Batch) -> list[tuple[jax.Array, jax.Array]]:
        """Return differences between two quarters of the rows computed apart and together."""
        batch, quarter = batch.whole(), batch.size // 4

        def values(first: int, last: int) -> tuple[Any, ...]:
            rows = jax.tree.map(lambda leaf: leaf[first * quarter : last * quarter], batch)
            view = View(step=state.step)
            returned, _ = self._objective.returned(state.params, state.extras, rows, view)
            return tuple(map(jnp.asarray, arrays_of_loss(returned)))

        def beside(one: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.concatenate([one, other]) if one.ndim else (one + other) / 2

        with contextlib.suppress(Exception):  # the user's loss, on few rows
            together = values(0, 2)
            alone = jax.tree.map(beside, values(0, 1), values(1, 2))
            unit = self._objective.precision.eps
            return [_share(*pair, unit) for pair in zip(alone, together, strict=True)]
        return []

    def decide(self, differences: list[tuple[jax.Array, jax.Array]]) -> None:
        """Set `rows_meet` from the `differences` of this loss."""
        self.rows_meet = any(share > bound for share, bound in differences)


class StepLook:
    """Examine a custom `step` on the first step's state and batch.

    The step is traced once, as for one device, and each loss once more by itself. A loss with an
    inconclusive trace is computed as in `Look`, or trusted if it is in a loop of the step.
    Raises `LossError` or `StateError` if a loss, or the step, violates its contract.
    """

    def __init__(
        self, step: Callable[..., Any], state: TrainState, batch: Batch, *, divided: bool
    ) -> None:
        self._divided = divided
        self._looks: list[Look] = []
        self._unsure: list[tuple[Look, Any]] = []
        self._weighs = self._gathers = False

        def run(state: TrainState, batch: Batch) -> Any:
            after, metrics = step(
                *(state, batch, None),
                accumulator=Sequential(),
                reduce=as_they_are,
                apply=keep,
                examiner=self,
            )
            return {"state": after.params, "metrics": metrics}, [each for _, each in self._unsure]

        try:
            traced, (shapes, _) = jax.make_jaxpr(run, return_shape=True)(state, batch)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise LossError(
                "the step reduces over the replicas itself (psum or pmean over an axis), but must "
                "also run without one: use rx.mean, rx.value_and_grad or rx.gather"
            ) from error
        names = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
        ]

        def depending(seed: Place, rows: Place) -> list[str]:
            inputs = [seed if leaf is state.seed else None for leaf in jax.tree.leaves(state)]
            places = follow(traced, [*inputs, *places_of(batch, rows)])[: len(names)]
            return [name for name, place in zip(names, places, strict=True) if place]

        self.from_rows = depending(None, Rows(0))
        """Names of outputs of the step that depend on rows without a sum over all of them."""
        self.from_key = depending(MIXED, None)
        """Names of outputs that depend on its key, which differs between replicas."""
        if self._unsure:
            shares = jax.jit(lambda *leaves: jaxpr_as_fun(traced)(*leaves)[len(names) :])
            found = iter(shares(*jax.tree.leaves((state, batch))))
            for look, differences in self._unsure:
                look.decide([(next(found), next(found)) for _ in differences])
        del self._unsure
        self.rows_meet = any(look.rows_meet for look in self._looks)
        """Whether some loss of a row depends on other rows, apart from gathered ones."""
        self.writes_alone = any(look.writes_alone for look in self._looks)
        """Whether some loss writes model state that depends on the visible rows."""
        self.scalars = tuple(name for look in self._looks for name in look.scalars)
        """Names of outputs that a loss returns as a scalar for the whole batch."""
        depends = (bool(self.from_rows) or self._gathers) and not self._weighs
        self.needs_real_rows = depends or any(look.needs_real_rows for look in self._looks)
        """Whether padding rows would change the step."""

    def loss(self, objective: Objective, state: TrainState, rows: Batch, outside: bool) -> None:
        """Examine one of the step's losses."""
        look = Look(objective, state, rows, divided=self._divided, compute=False)
        self._looks.append(look)
        if look.unsure and outside:
            self._unsure.append((look, look.differences(state, rows)))

    def step(self, here: Inside) -> None:
        """Record which functions the step itself called."""
        self._weighs, self._gathers = here.weighs, here.gathers


def places_of(batch: Batch, rows: Place) -> list[Place]:
    """Return where rows are in each leaf of `batch`: `rows` if it has rows, else None."""
    shared = len(jax.tree.leaves(batch.shared))
    return [rows] * (len(jax.tree.leaves(batch)) - shared) + [None] * shared


def _counts(rows: int) -> set[float]:
    """Return constants found in a loss that divides or multiplies by its number of rows."""
    counts = {float(rows), rows - 1.0} - {0.0, 1.0}
    return {float(np.float32(each)) for count in counts for each in (count, 1 / count)}


def _share(alone: jax.Array, together: jax.Array, unit: float) -> tuple[jax.Array, jax.Array]:
    """Return the largest difference relative to the largest value, and its rounding bound.

    The bound covers the eps `unit` of the computation and that of the returned dtype.
    """
    if together.dtype == bool:  # weights, which have no subtraction
        alone, together = alone.astype(jnp.int32), together.astype(jnp.int32)
    floating = jnp.issubdtype(together.dtype, jnp.floating)
    eps = jnp.finfo(together.dtype).eps if floating else 0  # type: ignore[no-untyped-call]
    unit = max(unit, float(eps)) if floating else 0.0
    largest = jnp.max(jnp.abs(jnp.stack([alone, together])))
    gap = jnp.max(jnp.abs(alone - together))
    return gap / jnp.where(largest > 0, largest, 1), jnp.minimum(_UNITS * unit, _COARSEST)
