"""What is verified: one `DataParallel` with its model and rows, run in any mode on any devices."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from replicax.core.batch import Batch, host_rows, place, row_count
from replicax.core.data_parallel import DataParallel
from replicax.core.loss import LOSS
from replicax.core.mesh import by_rows, make_mesh, replica_count
from replicax.core.models.definition import PyTree
from replicax.core.objective import Objective
from replicax.core.share import Share
from replicax.core.update import TrainState
from replicax.verify.difference import Leaves, changes, coarsest_eps, leaves
from replicax.verify.emulation import emulated_update

WARM_STEPS = 2
"""Steps before anything is compared: a warm-up's first learning rate is 0, and Adam's first update
knows only the gradient's sign."""
_LEAST_WEIGHT, _MOST_WEIGHT = 0.1, 10.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run the step."""

    mode: str
    micro_batches: int = 1
    devices: int = 1

    def __str__(self) -> str:
        if self.micro_batches == 1 or self.mode == "exact":
            return self.mode
        return f"{self.mode}, {self.micro_batches} micro-batches"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one step gave."""

    measured: Leaves
    """Metrics and the gradient, by path."""
    params: Leaves
    """What was added to the parameters."""
    extras: Leaves
    """What was added to the model's other arrays; those that are no floats as they are."""
    state: TrainState
    """After the step, on the devices."""


class Subject:
    """What is verified, and the means to run it.

    Args:
        dp: the step; its mode, mesh, layout and micro-batches are those that matter most.
        model: as for `dp.init`.
        batch: a pytree of arrays `[rows, ...]`.
        micro_batches: what `dp.accumulate` is compared with.
        seed: of the run.
    """

    def __init__(
        self, dp: DataParallel, model: Any, batch: PyTree, micro_batches: int, seed: int
    ) -> None:
        self.data = host_rows(batch, copy=False)
        self.rows = row_count(self.data)
        self.replicas = replica_count(dp.mesh)
        self.own = Case(dp.mode, dp.accumulate, self.replicas)
        self.micro_batches = sorted({1, dp.accumulate, micro_batches})
        self._model, self._seed = model, seed
        self._base = dp.replace(donate=False)
        self._optimizer = optax.with_extra_args_support(dp._optimizer)
        self._made: dict[Case, DataParallel] = {}
        self._emulations: dict[Case, Any] = {}
        self.state = self._warm_state()

    # How it is run.

    def parallel(self, case: Case) -> DataParallel:
        """The step in one case, which records its gradient in front of the optimizer."""
        if case not in self._made:
            changes: dict[str, Any] = {"mode": case.mode, "accumulate": case.micro_batches}
            if case.mode != self._base.mode:
                changes["layout"] = "replicated"
            if case.devices != self.replicas or case.mode == "single":
                devices = list(self._base.mesh.devices.flat)[: case.devices]
                changes["mesh"] = make_mesh(devices=devices)
            recorded = optax.chain(record_gradient(), self._optimizer)
            made = self._base.replace(optimizer=recorded, **changes)
            made.abstract_state(self._model)
            self._made[case] = made
        return self._made[case]

    def run(self, case: Case, batch: Batch, state: TrainState | None = None) -> Result:
        """One step from `state`, the warm one by default, which stays as it is."""
        state = self.state if state is None else state
        dp = self.parallel(case)
        after, metrics = dp.step(self.placed(case, state), self.batch_on(case, batch))
        return self._result(state, after, metrics)

    def emulate(self, case: Case, batch: Batch, state: TrainState | None = None) -> Result:
        """What the replicas of a per-replica mode have to compute, all of them on one device."""
        state = self.state if state is None else state
        if case not in self._emulations:
            single = self.parallel(Case("single", case.micro_batches))
            self._emulations[case] = emulated_update(
                self.objective, single._optimizer, self.replicas, case.micro_batches
            )
        after, metrics = self._emulations[case](state, _arrays(batch))
        return self._result(state, after, metrics)

    def trace(self, case: Case, batch: Batch) -> jax.stages.Traced:
        """The step of a case, traced afresh."""
        dp = self.parallel(case)
        fresh = dp.replace()
        fresh.abstract_state(self._model)
        return fresh.trace(self.placed(case, self.state), self.batch_on(case, batch))

    def compiled(self, case: Case, batch: Batch) -> jax.stages.Compiled:
        """The compiled step, which `run` has run or will run."""
        placed = self.placed(case, self.state), self.batch_on(case, batch)
        return self.parallel(case).lower(*placed).compile()

    def placed(self, case: Case, state: TrainState) -> TrainState:
        """`state` where the step of `case` has it."""
        abstract = self.parallel(case).abstract_state(self._model)
        placed: TrainState = jax.device_put(
            state, jax.tree.map(lambda leaf: leaf.sharding, abstract)
        )
        return placed

    def batch_on(self, case: Case, batch: Batch) -> Batch:
        """`batch` where the step of `case` has it."""
        return place(batch, Share(by_rows(self.parallel(case).mesh), batch.size))

    # What it is run on.

    @cached_property
    def full(self) -> Batch:
        """All rows."""
        return self.some(np.arange(self.rows))

    @cached_property
    def padded(self) -> Batch:
        """A batch whose real rows do not divide: the rest repeats them, with mask 0."""
        real = self.real_rows
        repeated = self.some(np.arange(self.rows) % real)
        mask = (np.arange(self.rows) < real).astype(np.float32)
        return dataclasses.replace(repeated, mask=mask, rows=real)

    @cached_property
    def weighted(self) -> Batch:
        """All rows, with weights from 0.1 to 10, so that no two replicas have the same sum."""
        low, high = np.log(_LEAST_WEIGHT), np.log(_MOST_WEIGHT)
        generator = np.random.default_rng(self._seed)
        weights = np.exp(generator.uniform(low, high, self.rows)).astype(np.float32)
        return dataclasses.replace(self.full, mask=weights, rows=None)

    @property
    def real_rows(self) -> int:
        """Real rows of the padded batch: about four fifths, and no multiple of the replicas."""
        return max(1, self.rows - max(1, self.rows // 5) | 1 if self.rows > 2 else 1)

    def some(self, indices: np.ndarray) -> Batch:
        """A batch of the rows of these indices."""
        data = jax.tree.map(lambda leaf: leaf[indices], self.data)
        count = len(indices)
        return Batch(data, np.ones(count, np.float32), indices.astype(np.int32), count)

    # What it is.

    @property
    def single(self) -> Case:
        """The reference."""
        return Case("single")

    @property
    def objective(self) -> Objective:
        """The loss on the model."""
        return self.parallel(self.single)._objective

    @cached_property
    def eps(self) -> float:
        """Unit of the coarsest dtype that the loss computes in."""
        state, batch = self.state, self.some(np.arange(min(self.rows, 2)))
        key = jax.random.key(0)
        return coarsest_eps(
            lambda params: self.objective.means(params, state.extras, batch, key, None)[0],
            state.params,
        )

    def updated(self, gradient: PyTree, loss: Any, state: TrainState | None = None) -> Leaves:
        """What one device's optimizer adds to the parameters for this gradient."""
        state = self.state if state is None else state
        _, inner = state.opt_state
        after = self._apply(state.params, inner, gradient, loss)
        return changes(state.params, after)

    # What these are made of.

    @cached_property
    def _apply(self) -> Any:
        def apply(params: PyTree, opt_state: Any, gradient: PyTree, loss: Any) -> PyTree:
            updates, _ = self._optimizer.update(gradient, opt_state, params, value=loss)
            return optax.apply_updates(params, updates)

        return jax.jit(apply)

    def _warm_state(self) -> TrainState:
        dp = self.parallel(self.single)
        state = dp.init(self._model, seed=self._seed)
        batch = self.batch_on(self.single, self.full)
        for _ in range(WARM_STEPS):
            state, _ = dp.step(state, batch)
        jax.block_until_ready(state)
        return state

    def _result(self, before: TrainState, after: TrainState, metrics: Mapping[str, Any]) -> Result:
        measured: Leaves = leaves(dict(metrics))
        measured = {name[2:-2]: value for name, value in measured.items()}
        gradient = {f"gradient{path}": value for path, value in leaves(after.opt_state[0]).items()}
        loss = {LOSS: measured.pop(LOSS)}
        return Result(
            {**loss, **measured, **gradient},
            changes(before.params, after.params),
            changes(before.extras, after.extras),
            after,
        )


def record_gradient() -> optax.GradientTransformation:
    """Keeps the newest gradient in its state, in front of an optimizer."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradient, _state, _params=None: (gradient, gradient),
    )


def _arrays(batch: Batch) -> Batch:
    return Batch(jax.tree.map(jnp.asarray, batch.data), jnp.asarray(batch.mask), batch.index)
