"""Evaluation: means of a loss, and predictions, over all rows of some batches."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.call_checks import EVALUATION, CallChecks
from replicax.core.data.batch import Batch
from replicax.core.first_step.argument_checks import check_kind, check_loss, check_state, with_key
from replicax.core.ground.leaves import PyTree, by_path, kind_changes
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.modes.mapping import lift
from replicax.core.placement.mesh import Axis, batch_shardings, by_rows, replicated
from replicax.core.program import Program
from replicax.core.step.loss import Totals
from replicax.core.step.objective import LossFunction, Objective
from replicax.errors import ConfigError, LossError

_IN_FLIGHT = 2
"""Number of batches computed while the results of an earlier one are read."""


class ProgramEvaluation:
    """Evaluate one program, checking and compiling each function once."""

    def __init__(self, program: Program, checks: CallChecks) -> None:
        self._program, self._checks = program, checks
        self._scoring: dict[Any, tuple[Program, CallChecks]] = {}
        self._predicting: dict[Any, Any] = {}

    def means(
        self, state: TrainState, batches: Any, loss: LossFunction | None, *, ema: bool
    ) -> dict[str, Any]:
        """Return the means over all rows of `batches`, or of each if it is a dict."""
        check_kind(state)
        state = self._program.averaged(state) if ema else state
        if isinstance(batches, Mapping):
            return {name: self._means(state, each, loss) for name, each in batches.items()}
        return self._means(state, batches, loss)

    def _means(
        self, state: TrainState, batches: Iterable[Any], loss: LossFunction | None
    ) -> dict[str, float]:
        program, checks = self._program, self._checks
        if loss is not None or program.configuration.step is not None:
            loss = program.objective.loss if loss is None else loss
            if _key(loss) not in self._scoring:
                other = program.scoring(loss)
                self._scoring[_key(loss)] = other, CallChecks(other)
            program, checks = self._scoring[_key(loss)]

        def score(state: TrainState, batch: Batch) -> Any:
            batch = checks.check(EVALUATION, program.score, state, batch)
            return program.score(state, batch)

        totals = Totals()
        for sums in self._results(score, state, batches):
            totals.add(sums)
        return totals.means()

    def rows(
        self, state: TrainState, batches: Any, function: Callable[..., Any], *, ema: bool
    ) -> PyTree:
        """Return `function(model, batch, None)` for all rows of `batches`, on the host."""
        if isinstance(batches, Mapping):
            raise ConfigError(
                f"predict got {len(batches)} sources ({', '.join(map(str, batches))}); it returns "
                "the rows of one: call it with each"
            )
        if _key(function) not in self._predicting:
            check_loss(with_key(function), "function")
        # Not left to `checks`: `predict` takes what they raise for outputs without rows.
        check_state(state, self._program.abstract_state())
        state = self._program.averaged(state) if ema else state
        if _key(function) not in self._predicting:
            program = self._program
            called = with_key(function)
            objective = dataclasses.replace(program.split_objective, loss=called)
            mode, mesh = program.configuration.mode, program.mesh
            outputs = partial(_predicted, objective=objective)
            compute = lift(
                outputs, mode, mesh, program.shardings, batch_shardings(mesh), by_rows(mesh)
            )
            checks = CallChecks(program.scoring(_as_loss(called)))
            self._predicting[_key(function)] = compute, checks
        compute, checks = self._predicting[_key(function)]

        def predict(state: TrainState, batch: Batch) -> Any:
            try:
                batch = checks.check(EVALUATION, compute, state, batch)
            except Exception:
                jax.eval_shape(compute, state, batch)  # if an output has no rows, it says so
                raise
            return compute(state, batch)

        parts = []
        for outputs, mask in self._results(predict, state, batches):
            real = self._on_host(mask) > 0
            parts.append(jax.tree.map(lambda leaf, real=real: self._on_host(leaf)[real], outputs))
        if not parts:
            raise ConfigError("predict got 0 batches; pass at least 1")
        for part in parts[1:]:
            for path, first, other in kind_changes(parts[0], part, _entry):
                raise LossError(
                    f"the function passed to predict returned{path} with rows of shape {first} for "
                    f"one batch and {other} for another; the rows of all batches are joined: pad "
                    "them to one shape, or call predict on each batch"
                )
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def _results(
        self, compute: Callable[..., Any], state: TrainState, batches: Iterable[Any]
    ) -> Iterator[Any]:
        pending = deque[Any]()
        for batch in batches:
            with self._program.configuration.dispatch_context():
                placed = batch if type(batch) is Batch else self._checks.placed(batch)
                pending.append(compute(state, placed))
            self._program.configuration.job.move()
            if len(pending) > _IN_FLIGHT:
                yield pending.popleft()
        yield from pending

    @cached_property
    def _whole(self) -> Any:
        return jax.jit(lambda leaf: leaf, out_shardings=replicated(self._program.mesh))

    def _on_host(self, leaf: jax.Array) -> np.ndarray:
        """Return all rows on the host, including those of other processes."""
        if not leaf.is_fully_addressable:
            with self._program.configuration.dispatch_context():
                leaf = self._whole(leaf)
        return np.asarray(leaf)


def _key(function: Callable[..., Any]) -> Any:
    """Return a key for `function`, which is kept: itself, or its identity if it has no hash."""
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function


def _entry(leaf: np.ndarray) -> str:
    return str(list(leaf.shape[1:]))


def _as_loss(function: LossFunction) -> LossFunction:
    """Return a loss whose metrics are the outputs of `function`, to find rows that mix."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        found = by_path(function(model, batch, key))
        rows = {f"prediction{path}": _as_numbers(leaf) for path, leaf in found.items()}
        return jnp.zeros(np.shape(next(iter(rows.values())))[:1]), rows

    return loss


def _as_numbers(leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    return (array.real + array.imag if jnp.iscomplexobj(array) else array).astype(jnp.float32)


def _predicted(
    state: TrainState, batch: Batch, axis: Axis | None, *, objective: Objective
) -> tuple[PyTree, jax.Array]:
    context = CallContext(axis=axis, step=state.step, whole=axis is None)
    found, _ = objective.returned(state.params, state.extras, batch, context)
    rows = batch.mask.shape[0]
    for path, leaf in (by_path(found) or {"": None}).items():
        if np.shape(leaf)[:1] != (rows,):
            raise LossError(
                f"the function passed to predict returned{path} of shape {np.shape(leaf)} for "
                f"{rows} rows; it must return a pytree of arrays [rows, ...]: "
                "return one entry per row, without taking a mean"
            )
    return found, batch.mask
