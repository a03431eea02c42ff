"""The checks before a program first runs: the loss, the other processes, the memory."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.core.batch import Batch
from replicax.core.capacity import check_fits
from replicax.core.configuration import Configuration
from replicax.core.job import Job
from replicax.core.leaves import describe_leaves, shapes_by_path
from replicax.core.look import Look, StepLook
from replicax.core.loss import LOSS
from replicax.core.models.definition import PyTree
from replicax.core.program import Program
from replicax.core.refused import check_kind, check_outside_jit, check_state, check_unused
from replicax.core.update import Metrics, TrainState
from replicax.errors import LossError


class Ready:
    """Runs the checks of one program, each only once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._abstract = program.abstract_state()
        self._look: Look | StepLook | None = None
        self._agreed: set[Any] = set()
        self._fits = False
        self._latest: Callable[[], TrainState | None] = lambda: None
        self._finite = program.configuration.wrap_apply is not None  # a wrapper has its own check

    def check(self, what: str, function: Any, state: TrainState, batch: Batch) -> None:
        """Check the state and the loss, and that all processes agree on `function`."""
        check_outside_jit(batch.mask)
        if state is self._latest():
            check_unused(state.step)
        else:
            check_kind(state)
            check_state(state, self._abstract)
            self._latest = weakref.ref(state)
        if self._look is None:
            self._look = self._looked(state, batch)
        if what == "the step" and isinstance(self._look, Look) and not self._look.moves:
            raise LossError(
                "the loss has a gradient of 0 for all parameters, so nothing would train; compute "
                "it from them in floats: without argmax, round, == or stop_gradient"
            )
        if self._look.needs_real_rows:
            rows = int(np.count_nonzero(batch.mask)) if batch.rows is None else batch.rows
            self.check_padding(batch.size, batch.feed_padding or batch.size - rows)
        configuration = self._program.configuration
        if configuration.job.processes > 1:
            shapes = (what, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)))
            if shapes not in self._agreed:
                agree_on_program(configuration, what, (state, batch), function.lower(state, batch))
                self._agreed.add(shapes)

    def check_memory(self, state: TrainState, batch: Batch) -> None:
        """Raise `ConfigError` if the first step needs more memory than available."""
        if not self._fits and self._program.holds(state, batch):
            compiled = self._program.compiled(state, batch)
            check_fits(compiled, self._program.configuration.mesh, batch.size)
            self._fits = True

    def check_result(self, state: TrainState, metrics: Metrics) -> None:
        """Raise `LossError` if the first step's loss is not finite, waiting for it.

        `state`, returned by a step, need not be checked when it is passed in again.
        """
        self._latest = weakref.ref(state)
        if self._finite:
            return
        loss = float(metrics[LOSS])
        if not math.isfinite(loss):
            raise LossError(
                f"the loss is {loss} in the first step; a run cannot recover from it: look at the "
                "batch and the initial parameters (jax_debug_nans finds the operation)"
            )
        self._finite = True

    def check_padding(self, size: int, padding: int | None) -> None:
        """Raise `LossError` if the loss, once checked, depends on padded rows."""
        look = self._look
        if not padding or look is None or not look.needs_real_rows:
            return
        where = f"{padding} of {size} rows in a batch of this feed are padding"
        if isinstance(look, StepLook) and look.from_rows:
            raise LossError(
                f"{look.from_rows[0]} depends on rows in the step itself, and {where}: take "
                "rx.mean of them, exclude padding with rx.row_weights(rows), or choose a batch "
                "size that divides the rows"
            )
        if look.scalars:
            raise LossError(
                f"{look.scalars[0]} is one number per batch, and {where}, which it cannot exclude: "
                "return one value per row, or choose a batch size that divides the rows"
            )
        raise LossError(
            f"the loss of a row depends on the other rows, and {where}: exclude them with "
            "rx.row_weights(rows), 0 on padding, or choose a batch size that divides the rows"
        )

    def _looked(self, state: TrainState, batch: Batch) -> Look | StepLook:
        """Check the loss; raise `LossError` if it needs all rows of a batch but sees only some."""
        configuration, split = self._program.configuration, self._program.split
        mode = configuration.mode
        alone = mode.per_replica or self._program.split_objective.per_replica
        alone = alone and split.replicas > 1
        seen_by = [f"{split.replicas} replicas"] * alone
        seen_by += [f"{split.micro_batches} micro-batches"] * (split.micro_batches > 1)
        look: Look | StepLook
        if configuration.step is None:
            look = Look(self._program.objective, state, batch, divided=bool(seen_by))
        else:
            look = StepLook(self._program.own_step, state, batch, divided=bool(seen_by))
            if alone:
                _check_alike(look, split.replicas)
        if (alone or mode.bitwise) and look.writes_alone:
            raise LossError(
                "the loss updates the model's state from the rows it sees, which differ between "
                f"{' and '.join(seen_by)}: use mode='jit', or rx.gather the rows"
            )
        if not (seen_by and look.rows_meet):
            return look
        some = f"each of {' and '.join(seen_by)} sees only some of the rows"
        if LOSS in look.scalars:
            raise LossError(
                "the loss is one number, and averaging it over equal parts of a batch differs from "
                f"the loss of the whole batch; {some}: return one value per row, as "
                "rx.Weighted(values, weights) if they have different weights"
            )
        fix = "gather the rows of all replicas with rx.gather(x)"
        if split.micro_batches > 1 and not mode.bitwise:
            fix = "use accumulate=1"
        if self._program.split_objective.per_replica:
            fix = "use a mesh without stages"
        raise LossError(
            f"the loss of a row depends on the other rows, and {some}, which changes it: {fix}"
        )


def _check_alike(look: StepLook, replicas: int) -> None:
    """Raise `LossError` if a step gives replicas different states or metrics."""
    if look.from_rows:
        raise LossError(
            f"{look.from_rows[0]} depends on rows in the step itself, which differ between the "
            f"{replicas} replicas, but replicas must stay equal: take rx.mean of rows, "
            "rx.value_and_grad of a loss of them, or rx.gather them"
        )
    if look.from_key:
        raise LossError(
            f"{look.from_key[0]} depends on the step's key, which differs between the {replicas} "
            "replicas, but replicas must stay equal: draw in a loss, or keep a key in the state"
        )


def agree_on_model(job: Job, model: PyTree, seed: int) -> None:
    """Raise `AgreementError` if the processes start from different models or seeds."""
    leaves = jax.tree.leaves(model)
    shared = any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves)
    if job.processes > 1 and not shared:
        job.agree("the initial model", {"seed": seed, **describe_leaves(model)})


def agree_on_program(
    configuration: Configuration, what: str, arguments: tuple[Any, Any], lowered: jax.stages.Lowered
) -> None:
    """Raise `AgreementError` if the processes are about to run different programs."""
    job, mesh = configuration.job, configuration.mesh
    if job.processes > 1:
        state, batch = map(shapes_by_path, arguments)
        devices = [device.id for device in mesh.devices.flat]
        where = {"mesh": {**mesh.shape, "devices": devices}}
        job.agree(what, {**configuration.names(), **where, "state": state, "batch": batch})
        job.agree_on_text(what, lowered.as_text())
