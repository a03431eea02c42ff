"""The part of a run that begins where an earlier start, or another island, is."""

import jax

from replicax.core.ground.train_state import TrainState, check_unused
from replicax.train.checkpoints.arrays import abstract, params_not_finite
from replicax.train.run.loop import Loop
from replicax.train.run.members import GivenRun
from replicax.train.run.run_state import first_batch


class Resuming(Loop):
    """A loop that moves to a saved or received position before its first step."""

    epochs: int | None
    total: int | None
    _donated: bool
    _never_finite: set[str]

    def _resume(self) -> None:
        """Move to the saved position, and replace the state with the saved one."""
        given = self._members.given
        if given is not None:
            self._receive(given)
        else:
            self._restore()
        if self._members.has_islands and jax.tree.leaves(self.state.islands) and self.place.step:
            self.state = self._own_state(restored=given is None or given.begins)

    def _restore(self) -> None:
        """Do so from the newest checkpoint, if there is one."""
        found = None if self._storage is None else self._storage.found
        if self._storage is None or found is None:
            check_unused(self.state)
            return
        batch = first_batch(self.source, found.position, found.extra)
        if self.epochs is not None and self.source.batches is not None:  # in the current batches
            remaining = (self.epochs - found.position.epoch) * self.source.batches - batch
            self.total = found.position.step + max(remaining, 0)
        like = abstract(self.state)
        if self.dp.donate:
            for leaf in jax.tree.leaves(self.state):
                leaf.delete()
        self.records.extend(found.records)
        self._run_state.load_state(found.position, {**found.extra, "batch": batch})
        self.state = self._storage.restore(like)
        if self._donated:
            self._never_finite |= params_not_finite(self.state)

    def _receive(self, given: GivenRun) -> None:
        """Continue the run that another island gave to this one."""
        like = abstract(self.state)
        self.records.extend(given.records)
        self._run_state.load_state(given.position, given.extra)
        self.state = given.state(like)
        self._stopping.load_state(given.votes)
        given.arrays.clear()

    def _own_state(self, *, restored: bool) -> TrainState:
        """Return the state with what this island has for itself, or as one that joins."""
        own = None if self._storage is None else self._storage.own
        step = self.place.step
        if own is not None and (found := own.found(self.state, step, self.alarm)) is not None:
            return found
        if restored:
            self.alarm(
                f"this island saved nothing of its own at step {step:,}, and takes the optimizer "
                "state of another: results differ from those of a run that was not stopped"
            )
        step_program = self.dp.program(self.state).step
        return self.dp.configuration.between.joined(step_program, self.state)
