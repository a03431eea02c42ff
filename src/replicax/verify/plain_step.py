"""A step on one device in plain JAX: the gradient of the mean, and one update by the optimizer."""

import contextlib
import dataclasses
import functools
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import to_sum
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.step.loss import LOSS
from replicax.verify.plain import PlainLoss
from replicax.verify.subject import SkippedStepError, Subject, as_arrays


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """The reference of a program: `plain.py` on its loss, and its optimizer."""

    subject: Subject
    replicas: int = 1
    parts: int = 1
    real_rows: bool = True
    """Whether it gets only the real rows of a batch."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return state and metrics after one step, as the recording optimizer has them.

        Raises:
            SkippedStepError: the loss or its gradient is not finite.
        """
        batch = self.given(batch)
        gradient, metrics, extras = self.gradient(state, batch)
        found = [metrics[LOSS], *jax.tree.leaves(gradient)]
        if not all(np.isfinite(np.asarray(leaf)).all() for leaf in found):
            raise SkippedStepError("one device")
        _, inner = state.opt_state
        params, inner = self.subject.apply(state.params, inner, gradient, metrics[LOSS])
        after = dataclasses.replace(
            state,
            step=state.step + np.int32(1),
            params=params,
            opt_state=(gradient, inner),
            extras=extras,
        )
        return after, as_arrays(metrics, batch.mask)

    def gradient(
        self, state: TrainState, batch: Batch, times: float = 1.0
    ) -> tuple[PyTree, Metrics, PyTree]:
        """Return the gradient of `times` the loss, the metrics, and the extras after the step."""

        def run() -> tuple[PyTree, Metrics, PyTree]:
            found: tuple[PyTree, Metrics, PyTree] = self._begun(state, batch).result()(
                *self._arguments(state, batch), np.float32(times)
            )
            return found

        compared = state is self.subject.state and batch is self.subject.full
        key = ("gradient", self.replicas, self.parts, times)
        return self.subject.once(key, state, run) if compared else run()

    def mean(self, state: TrainState, batch: Batch, params: PyTree) -> jax.Array:
        """Return the mean loss with these parameters."""
        _, extras, seed, step, _, batch = self._arguments(state, batch)
        key = jax.random.fold_in(jax.random.key(seed), step)
        params = self.loss.with_constants(params)
        mean: jax.Array = self.loss.means(params, extras, batch, key, step)[0][LOSS]
        return mean

    def compiled(self, batch: Batch) -> jax.stages.Compiled:
        """Return the program of `gradient` for a batch."""
        found: jax.stages.Compiled = self._begun(self.subject.state, self.given(batch)).result()
        return found

    def given(self, batch: Batch) -> Batch:
        """Return the rows that it gets of a batch."""
        real = np.flatnonzero(np.asarray(batch.mask))
        if not self.real_rows or len(real) in (0, batch.size):
            return batch
        some: Batch = jax.tree.map(lambda leaf: leaf[real], batch)
        return dataclasses.replace(some, rows=len(real))

    def compile_ahead(self, batch: Batch) -> None:
        """Trace it for a batch, and begin to compile it; errors are raised by a call."""
        with contextlib.suppress(Exception):  # the user's loss
            self._begun(self.subject.state, self.given(batch))

    @functools.cached_property
    def loss(self) -> PlainLoss:
        """Return the loss of the program."""
        objective = self.subject.objective
        return PlainLoss(
            objective.definition,
            objective.loss,
            objective.precision,
            self.replicas,
            self.parts,
            self.subject.trained,
        )

    def traced(self, *given: Any) -> tuple[PyTree, Metrics, PyTree]:
        """Return what `gradient` does, of arrays."""
        params, extras, seed, step, scale, batch, times = given
        key = jax.random.fold_in(jax.random.key(seed), step)
        found = self.loss.gradient(params, extras, batch, key, step, times * scale)
        gradient, means, extras = found
        unscaled = lambda leaf, param: (to_sum(leaf) / scale).astype(param.dtype)  # noqa: E731
        return jax.tree.map(unscaled, gradient, params), means, extras

    def _arguments(self, state: TrainState, batch: Batch) -> tuple[Any, ...]:
        scale = state.scale.value if state.scale else np.float32(1)
        given = (state.params, state.extras, state.seed, state.step, scale, batch.apart())
        placed: tuple[Any, ...] = jax.device_put(given, self.subject.one_device)
        return placed

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """Return the trace of `gradient` for batches of this size."""

        def traced() -> jax.stages.Traced:
            made = jax.jit(self.traced, compiler_options=self.subject.quick)
            return made.trace(*self._arguments(state, batch), np.float32(1))

        key = ("trace", self.replicas, self.parts, batch.size)
        found: jax.stages.Traced = self.subject.once(key, None, traced)
        return found

    def _begun(self, state: TrainState, batch: Batch) -> Future[Any]:
        lowered = lambda: self.trace(state, batch).lower()  # noqa: E731
        return self.subject.begun((self.replicas, self.parts, batch.size), lowered)
