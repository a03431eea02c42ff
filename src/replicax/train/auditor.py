"""Whether all replicas still hold the same bits, and which device errs where they do not."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicax.core.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import replica_count
from replicax.core.sources import Source
from replicax.core.update import TrainState
from replicax.errors import ConfigError, DivergedError, ReplicasDifferError, did_you_mean
from replicax.train.dispatched import Dispatched, Place
from replicax.train.fingerprint import Difference, Fingerprint
from replicax.train.snapshot import Snapshot
from replicax.wording import listed, named, size_text

ON_DIVERGENCE = ("stop", "restore")

RESTORES = 3
"""Times in a row that a run goes back to the same step before it gives up."""

_STEPS_LATE = 2
"""Steps that are begun before an audit is read: by then it is done, and the devices have work."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """Where a run goes on after a divergence."""

    state: TrainState
    place: Place
    devices: tuple[int, ...]
    """Ids of those that erred; none where that cannot be told."""
    text: str


TABLE = "audit"
"""The name under which fingerprints are attached to a step."""


class Auditor:
    """Compares the replicas every so many steps, while the devices go on.

    Where it may have to go back it keeps the state of the last clean audit in host memory, and then
    waits for the devices at each audit.

    Args:
        dp: what steps; of `replicax.train.guarded`.
        state: its state.
        source: what it is fed from.
        every: steps between two audits.
        on_divergence: `stop` or `restore`.

    Raises:
        ConfigError: nothing to compare, or a source that cannot go back.
    """

    def __init__(
        self, dp: DataParallel, state: TrainState, source: Source, every: int, on_divergence: str
    ) -> None:
        _check(dp, source, every, on_divergence)
        self.clean = 0
        self.restores = 0
        self.good: Place | None = None
        self._dp, self._source = dp, source
        self._every, self._restores = every, on_divergence == "restore"
        self._fingerprint = Fingerprint(state)
        self._devices = list(dp.mesh.devices.flat)
        self.keeps = self._restores or (replica_count(dp.mesh) == 2 and source.can_repeat)
        self._snapshot: Snapshot | None = None
        self._taken = self._read = -1  # the last steps of which a fingerprint was taken, and read
        self._in_a_row = 0
        self._restored_from: Place | None = None
        self._never_finite: set[str] = set()
        if not any(leaf.startswith("params") for leaf in self._fingerprint.compared):
            raise ConfigError(
                "an audit with a layout that has each parameter on one device alone; "
                "an audit compares copies: leave it out, or use layout='replicated' or 'zero1'"
            )

    def describe(self) -> list[str]:
        """What is audited, a line each."""
        of = self._fingerprint
        steps = "every step" if self._every == 1 else f"every {self._every:,} steps"
        lines = [
            f"audit  {steps}: {len(of.compared)} leaves, {size_text(of.compared_bytes)} on each "
            f"of {len(self._devices)} devices"
        ]
        if of.alone_bytes:
            alone = size_text(of.alone_bytes)
            lines.append(f"       {alone} more are on no other device: nothing to compare with")
        if self._snapshot is not None:
            lines.append(
                f"       the last good state is kept: {size_text(self._snapshot.nbytes)} of host "
                "memory"
            )
        elif replica_count(self._dp.mesh) == 2:
            lines.append("       of 2 replicas, which one is wrong cannot be told: the source")
            lines.append("       is an iterator, and steps cannot be replayed")
        return lines

    def begin(self, state: TrainState, place: Place) -> None:
        """Audit the state that the run starts from.

        Raises:
            ReplicasDifferError: its copies are not equal.
        """
        table = self._fingerprint.take(state)
        if differences := self._fingerprint.differences(table):
            self._dp.job.barrier("what an audit has found")
            raise ReplicasDifferError(self._text(differences, self._outvoted(differences), place))
        self._never_finite = set(self._fingerprint.not_finite(table))
        self._note_good(place, state)

    def take(self, state: TrainState, place: Place) -> jax.Array | None:
        """Return fingerprints of the state after a step, if it is one to be audited.

        Args:
            state: not yet given to the next step.
            place: after the step.
        """
        if place.step % self._every:
            return None
        self._taken = place.step
        return self._fingerprint.take(state)

    def waits(self, place: Place) -> bool:
        """Return whether all steps up to `place` have to finish before there is another one."""
        return self.keeps and place.step % self._every == 0

    def after(
        self, state: TrainState, place: Place, done: Sequence[Dispatched], *, look: bool = False
    ) -> Restored | None:
        """Read the audits that are due, and look at the steps that have finished.

        Args:
            state: not yet given to the next step.
            place: of it.
            done: the steps that have finished since the last call.
            look: whether to audit `state` in any case.

        Returns:
            Where to go on from, where that is not here.

        Raises:
            ReplicasDifferError: the replicas differ, and the run is to stop, or has gone back too
                often.
            DivergedError: the state is not finite any more, and it is no device's fault.
        """
        on_the_way = self._dp.job.in_flight.remaining
        late = 0 if self.keeps or not on_the_way else _STEPS_LATE
        unread = [*done, *on_the_way]
        tables = [(step.place, step.attached[TABLE]) for step in unread if TABLE in step.attached]
        if look and self._taken != place.step:
            self._taken = place.step
            tables.append((place, self._fingerprint.take(state)))
        for audited, table in tables:
            if self._read < audited.step <= place.step - late:
                self._read = audited.step
                differences = self._fingerprint.differences(table)
                if differences:
                    return self._diverged(differences, state, audited, place, unread)
                self._check_finite(table, audited)
                self.clean += 1
                self._note_good(audited, state)
        for number, step in enumerate(done):
            # A device may be to blame. If none is, the step was skipped by all alike, which
            # `replicax.train.bad_steps` follows.
            if bool(step.not_finite):
                differences = self._fingerprint.differences(self._fingerprint.take(state))
                if differences:
                    return self._diverged(differences, state, place, place, unread[number:])
        return None

    def _check_finite(self, table: jax.Array, place: Place) -> None:
        """That the state is finite where it was at first: an optimizer's may be so no longer."""
        leaves = [x for x in self._fingerprint.not_finite(table) if x not in self._never_finite]
        if leaves:
            self._dp.job.barrier("what an audit has found")
            raise DivergedError(f"not finite at step {place.step}: {named(leaves)}{_CANNOT_GO_ON}")

    def _note_good(self, place: Place, state: TrainState) -> None:
        self.good = place
        if self.keeps:
            self._snapshot = Snapshot(state)

    def _diverged(
        self,
        differences: list[Difference],
        state: TrainState,
        audited: Place,
        now: Place,
        unread: Sequence[Dispatched],
    ) -> Restored:
        """Name the devices; stop, or go back.

        Args:
            differences: between devices.
            state: the newest.
            audited: where they were found.
            now: where `state` is.
            unread: the newest steps, of which nobody knows yet whether they were finite.
        """
        wrong, how = self._outvoted(differences), ""
        if not wrong:
            wrong, how = self._replayed(differences, state, now.step, unread)
        text = self._text(differences, wrong, audited, how)
        if not self._restores:
            self._dp.job.barrier("what an audit has found")
            raise ReplicasDifferError(f"{text}: {self._advice(wrong)}")
        assert self._snapshot is not None
        assert self.good is not None
        self._in_a_row = 1 if self._restored_from != self.good else self._in_a_row + 1
        self._restored_from = self.good
        if self._in_a_row > RESTORES:
            self._dp.job.barrier("what an audit has found")
            raise ReplicasDifferError(
                f"{text}, again after {RESTORES} restores of step {self.good.step}: "
                f"{self._advice(wrong)}"
            )
        self.restores += 1
        self._taken = self._read = self.good.step
        devices = tuple(self._devices[place].id for place in wrong)
        return Restored(self._snapshot.restore(), self.good, devices, text)

    def _outvoted(self, differences: list[Difference]) -> tuple[int, ...]:
        """Places of the devices that most others contradict."""
        return tuple(sorted({place for each in differences for place in each.wrong or ()}))

    def _replayed(
        self,
        differences: list[Difference],
        state: TrainState,
        step: int,
        unread: Sequence[Dispatched],
    ) -> tuple[tuple[int, ...], str]:
        """Places of the devices that a replay from the last good state contradicts, and its words.

        What one replica computed from wrong weights is in the gradient that all were given. So none
        may be where the replay is, but the right one is the nearest: it has not the fault itself.
        """
        if self._snapshot is None or self.good is None:
            return (), "no state to replay from is kept"
        # As long as no step has been finite again, all of the state has stood still.
        for each in reversed(unread):
            if not bool(each.not_finite):
                break
            step = each.place.step - 1
        count = max(step - self.good.step, 0)
        steps = f"{count} steps" if count > 1 else "the step"
        source = f"a replay of {steps} since" if count else "the last good state"
        replay = self._snapshot.restore()
        for batch in self._batches(self.good, count):
            replay, _ = self._dp.step(replay, batch)
        if self._fingerprint.differences(self._fingerprint.take(replay)):
            return (), f"{source} makes them differ again"
        votes, exact = self._votes(differences, state, replay)
        best = max(votes.values())
        wrong = tuple(sorted(place for place, count in votes.items() if count < best))
        right = self._names([place for place in votes if place not in wrong])
        if not wrong:
            return (), f"{source} is as near to each"
        verb = "gives the bits of" if exact else "comes nearest to"
        return wrong, f"{source} {verb} {right}"

    def _votes(
        self, differences: list[Difference], state: TrainState, replay: TrainState
    ) -> tuple[dict[int, int], bool]:
        """Elements in which each device is nearest to the replay, and whether the best equals it.

        Only those count in which devices differ from each other.
        """
        votes: dict[int, int] = {place: 0 for each in differences for place in sum(each.groups, ())}
        exact = True
        for each in differences:
            held = self._fingerprint.gather(state, each.leaf)
            again = self._fingerprint.gather(replay, each.leaf)
            places = [group[0] for group in each.groups]
            distance = np.stack([_distance(held[place], again[place]) for place in places])
            apart = distance[:, (distance != distance[:1]).any(0)]
            nearest = apart == apart.min(0)
            exact &= not apart.min(0, initial=np.inf).any()
            for group, count in zip(each.groups, nearest.sum(1), strict=True):
                for place in group:
                    votes[place] += int(count)
        return votes, exact

    def _batches(self, since: Place, count: int) -> Iterator[Batch]:
        """The batches of `count` steps after `since`, once more."""
        epoch, first = since.epoch, since.batch
        while count:
            for batch in self._dp.feed(self._source, epoch=epoch, first=first):
                yield batch
                count -= 1
                if not count:
                    return
            epoch, first = epoch + 1, 0

    def _text(
        self, differences: list[Difference], wrong: Sequence[int], at: Place, how: str = ""
    ) -> str:
        """Who differs in what, and since when."""
        what = named(list(dict.fromkeys(each.leaf for each in differences)))
        when = f"after step {at.step}" if at.step else "before the first step"
        if self.good is not None:
            when += f"; all were equal after step {self.good.step}"
        if how:
            when += f"; {how}"
        if wrong:
            verb = "holds" if len(wrong) == 1 else "hold"
            return f"{self._names(wrong)} {verb} wrong bits in {what} {when}"
        places = sorted({place for each in differences for place in sum(each.groups, ())})
        return f"{self._names(places)} hold different bits in {what} {when}; who is right is open"

    def _advice(self, wrong: Sequence[int]) -> str:
        """What to do about it."""
        assert self.good is not None
        advice = f"start again without {self._names(wrong)}" if wrong else "test these devices"
        if self._restores:
            return advice
        back = f"go back to step {self.good.step} and on from there"
        return f"{advice}, or have on_divergence='restore' {back}"

    def _names(self, places: Sequence[int]) -> str:
        """`devices 4 and 5 of process 1`."""
        of: dict[int, list[str]] = {}
        for device in (self._devices[place] for place in places):
            of.setdefault(device.process_index, []).append(str(device.id))
        names = [f"device{'s' * (len(of[p]) > 1)} {listed(of[p])} of process {p}" for p in of]
        return listed(names)


_CANNOT_GO_ON = (
    ", and all replicas hold the same bits: no device is at fault, and training cannot go on from "
    "it: lower the learning rate, or clip the gradient"
)


def _check(dp: DataParallel, source: Source, every: int, on_divergence: str) -> None:
    if on_divergence not in ON_DIVERGENCE:
        raise ConfigError(
            f"on_divergence={on_divergence!r}; it is one of {', '.join(ON_DIVERGENCE)}"
            f"{did_you_mean(on_divergence, ON_DIVERGENCE)}"
        )
    if every < 1:
        raise ConfigError(f"every={every} of an audit; it is at least 1 step: raise it")
    if dp.mesh.devices.size == 1:
        raise ConfigError(
            "an audit on 1 device; an audit compares the copies of several, and there "
            "is nothing to compare with one device: leave it out, or use more devices"
        )
    if on_divergence == "restore" and not source.can_repeat:
        raise ConfigError(
            "on_divergence='restore' with an iterator of batches, which cannot go back to an "
            "earlier one; give a list, a loader that can be iterated again, or arrays"
        )


def _distance(held: np.ndarray, again: np.ndarray) -> Any:
    """How far each element is from what it should be: 0 for the same bits alone."""
    same = _bits(held) == _bits(again)
    with np.errstate(invalid="ignore", over="ignore"):
        kind: Any = np.complex128 if held.dtype.kind == "c" else np.float64
        apart = np.abs(held.astype(kind) - again.astype(kind))
    apart = np.where(np.isnan(apart), np.inf, np.maximum(apart, np.finfo(np.float64).tiny))
    return np.where(same, 0.0, apart).reshape(-1)


def _bits(array: np.ndarray) -> np.ndarray:
    """Unsigned integers of the elements' bits; for complex ones, all that compares equal."""
    if array.dtype.kind in "cb":
        return array
    return array.view(f"u{array.dtype.itemsize}")
