"""`Audit`: a hook that compares the replicas bitwise during a run."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import numbers
from replicax.core.ground.train_state import TrainState
from replicax.core.placement.mesh import is_data_only, replica_count
from replicax.errors import ConfigError, DivergedError, ReplicasDifferError, choose
from replicax.islands.island_job import IslandJob
from replicax.text.arguments import Count, typed
from replicax.text.wording import counted, listed, named, size_text
from replicax.train.checkpoints.arrays import abstract, as_key
from replicax.train.dispatched import Dispatched, RunPosition
from replicax.train.files.fingerprint import Fingerprint, UnequalCopies
from replicax.train.hooks.hook import Hook, Running
from replicax.train.hooks.island_audit import IslandAudit, is_own

RESTORES = 3
"""Maximum number of consecutive restores of the same step."""
_TABLE = "audit"  # the name under which fingerprints are attached to a step


class Snapshot:
    """A copy of `state` in host memory: the distinct shards of each array that this process holds.

    Waits until `state` is computed. In a multi-process job, every process makes one.
    """

    def __init__(self, state: TrainState) -> None:
        self._like = abstract(state)
        self._parts = [_parts(numbers(leaf)) for leaf in jax.tree.leaves(state)]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._parts for part in parts.values())

    def restore(self) -> TrainState:
        """Return a new state with the same bits, with all replicas created from this snapshot.

        Host arrays are copied: a device may use one as its buffer, which a step overwrites.
        """

        def placed(like: jax.ShapeDtypeStruct, parts: dict[str, np.ndarray]) -> jax.Array:
            shape = jax.eval_shape(numbers, like).shape
            data = jax.make_array_from_callback(
                shape, like.sharding, lambda index: parts[str(index)].copy()
            )
            return as_key(data, like)

        leaves, tree = jax.tree.flatten(self._like)
        state: TrainState = jax.tree.unflatten(tree, map(placed, leaves, self._parts))
        return state


def _parts(array: jax.Array) -> dict[str, np.ndarray]:
    """Return index -> host copy of the shard at that index of `array`."""
    once: dict[str, Any] = {str(shard.index): shard.data for shard in array.addressable_shards}
    return {index: np.array(data, copy=True) for index, data in once.items()}


class Audit(Hook):
    """Compares all replicated state bitwise across devices and islands, every `every` steps.

    If it may have to go back, it keeps the state of the last clean audit in host memory and waits
    for the devices at each audit. Of islands, those that a majority outvotes leave, and receive
    its state when they are started again. See docs/audit.md.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=9, hooks=[rx.hooks.Audit(every=100)])

    Args:
        every: steps between two audits.
        on_divergence: action if a device holds different bits: `stop`, or `restore` the state of
            the last clean audit and continue from there.

    Raises:
        ConfigError: `every` below 1 or an unknown action; when the run starts: nothing to compare,
            or a source that cannot go back.
        ReplicasDifferError: in the run: the replicas are no longer equal.
        IslandLeftError: in the run: most islands hold another state than this one.
        DivergedError: in the run: the state is no longer finite, and no device is at fault.
    """

    _fingerprint: Fingerprint
    _islands: IslandAudit | None
    _good: RunPosition | None
    _snapshot: Snapshot | None
    _never_finite: set[str]
    _done: list[Dispatched]

    @typed
    def __init__(self, every: Count, on_divergence: Literal["stop", "restore"] = "stop") -> None:
        ways = {"stop": False, "restore": True}
        self._restoring = choose("on_divergence", on_divergence, ways)
        self._every = every
        self.clean = 0
        """Number of audits that found all replicas equal, since the run started or resumed."""
        self.restores = 0
        """Number of restores of a clean audit's state, since the run started or resumed."""

    @property
    def interval(self) -> int:
        return self._every

    def start(self, run: Running) -> None:
        """Audit the state that the run starts from."""
        two = (
            self._islands is None and replica_count(run.dp.mesh) == 2
        )  # a replay shows which one is right
        self._keeps = self._restoring or (two and run.source.can_repeat)
        self._done = []
        self._good = self._snapshot = None
        self.clean = self.restores = 0
        table = self._fingerprint.take(run.state)
        if differences := self._fingerprint.differences(table):
            text = self._text(run, differences, _outvoted(differences), run.place)
            self._fail(run, ReplicasDifferError(text))
        self._never_finite = set(self._fingerprint.not_finite(table))
        self._keep_good(run, run.place)
        run.note_good()
        self._say_what_is_audited(run, two)

    def dispatched(self, run: Running, step: Dispatched) -> None:
        """Dispatch the fingerprints of the state if this step is to be audited."""
        if step.place.step % self._every == 0:
            if self._islands is not None:
                self._compare_islands(run, self._islands, step.place)
                return
            step.attached[_TABLE] = self._fingerprint.take(run.state)
            if self._keeps:
                run.wait()

    def _compare_islands(self, run: Running, islands: IslandAudit, place: RunPosition) -> None:
        """Compare right after a step is dispatched: that is the same moment in all islands."""
        table = self._fingerprint.take(run.state)
        line = islands.compare(run.state, table, place.step)
        self._check_finite(run, table, place)
        if line is None:
            self.clean += 1
            return
        run.alarm(line)
        if run.resumable:
            run.save()  # the island that wrote the last checkpoint may be the one that left

    def step(self, run: Running, step: Dispatched) -> None:
        self._done.append(step)

    def settle(self, run: Running, due: bool) -> None:
        if self._islands is not None:
            self._done.clear()
            return
        done, self._done = self._done, []
        tables = [(s.attached[_TABLE], s.place) for s in done if _TABLE in s.attached]
        if any(self._is_over(run, *each, done) for each in tables):
            return
        if due and self._good is not None and self._good.step != run.place.step:
            table = self._fingerprint.take(run.state)
            if self._is_over(run, table, run.place, done):
                return
        # A device may be at fault. If not, all devices skipped the step, which
        # `replicax.train.run.step_records` tracks.
        if any(step.not_finite for step in done):
            table = self._fingerprint.take(run.state)
            if differences := self._fingerprint.differences(table):
                self._diverged(run, differences, run.place, done)
                return
        if self._keeps and self._good == run.place:  # also if a record was due since
            run.note_good()

    def summary(self) -> list[str]:
        clean = "1 audit, clean" if self.clean == 1 else f"{self.clean:,} clean"
        back = f" · went back {counted(self.restores, 'time')}" if self.restores else ""
        return [f"audit  {clean}{back}"]

    def before_run(self, run: Running) -> None:
        self._fingerprint = Fingerprint(run.state)
        self._islands, self._done = None, []
        if isinstance(run.dp.job, IslandJob):
            shards = run.dp.layout.splits_optimizer or not is_data_only(run.dp.mesh)
            self._islands = IslandAudit(run.dp.job, self._fingerprint, shards=shards)
            if self._restoring:
                raise ConfigError(
                    "on_divergence='restore' with islands; one that is outvoted receives the state "
                    "of the others when it is started again: leave it out"
                )
            return
        if run.dp.mesh.devices.size == 1:
            raise ConfigError(
                "an audit on 1 device; an audit compares copies across devices, so there "
                "is nothing to compare with one device: remove it, or use more devices"
            )
        if self._restoring and not run.source.can_repeat:
            raise ConfigError(
                "on_divergence='restore' with an iterator of batches, which cannot go back to an "
                "earlier one; use a list, a loader that can be iterated again, or arrays"
            )
        if not any(leaf.startswith("params") for leaf in self._fingerprint.compared):
            raise ConfigError(
                "an audit with a layout that stores each parameter on one device only; an audit "
                "compares copies: remove it, or use layout='replicated' or 'zero1'"
            )

    def _say_what_is_audited(self, run: Running, two: bool) -> None:
        of = self._fingerprint
        steps = "every step" if self._every == 1 else f"every {self._every:,} steps"
        if self._islands is not None:
            agreed = [leaf for leaf in of.leaves if not is_own(leaf)]
            size = size_text(sum(of.leaf_bytes[leaf] for leaf in agreed))
            run.say(f"audit  {steps}: {len(agreed)} leaves, {size}, of each island")
            return
        run.say(
            f"audit  {steps}: {len(of.compared)} leaves, {size_text(of.compared_bytes)} on each "
            f"of {run.dp.mesh.devices.size} devices"
        )
        if of.alone_bytes:
            alone = size_text(of.alone_bytes)
            run.say(f"       {alone} more are on one device only and cannot be compared")
        if self._snapshot is not None:
            kept = size_text(self._snapshot.nbytes)
            run.say(f"       the last good state is kept: {kept} of host memory")
        elif two:
            run.say("       with 2 replicas, it cannot tell which one is wrong: the")
            run.say("       source is an iterator, so steps cannot be replayed")

    def _is_over(
        self, run: Running, table: jax.Array, place: RunPosition, done: Sequence[Dispatched]
    ) -> bool:
        """Read the fingerprints of the state at `place`; return whether the run goes back."""
        if differences := self._fingerprint.differences(table):
            self._diverged(run, differences, place, done)
            return True
        self._check_finite(run, table, place)
        self.clean += 1
        self._keep_good(run, place)
        return False

    def _check_finite(self, run: Running, table: jax.Array, place: RunPosition) -> None:
        """Raise `DivergedError` if the state, perhaps only the optimizer's, is no longer finite."""
        leaves = [x for x in self._fingerprint.not_finite(table) if x not in self._never_finite]
        if leaves:
            why = (
                f"not finite at step {place.step}: {named(leaves)}, and all replicas hold the same "
                "bits, so no device is at fault, but training cannot continue: lower the "
                "learning rate, or clip the gradient"
            )
            self._fail(run, DivergedError(why))

    def _keep_good(self, run: Running, place: RunPosition) -> None:
        self._good, self._in_a_row = place, 0
        if self._keeps:
            self._snapshot = Snapshot(run.state)

    def _diverged(
        self,
        run: Running,
        differences: list[UnequalCopies],
        at: RunPosition,
        done: Sequence[Dispatched],
    ) -> None:
        """Name the faulty devices; stop or go back. `done` are the steps since the last check."""
        wrong, how = _outvoted(differences), ""
        if not wrong:
            wrong, how = self._replayed(run, differences, done)
        text = self._text(run, differences, wrong, at, how)
        advice = f"restart without {_names(run, wrong)}" if wrong else "test these devices"
        good = self._good
        assert good is not None
        if not self._restoring or self._snapshot is None:
            back = f"go back to step {good.step} and continue"
            why = f"{text}: {advice}, or let on_divergence='restore' {back}"
            self._fail(run, ReplicasDifferError(why))
        self._in_a_row += 1
        if self._in_a_row > RESTORES:
            again = f"again after {RESTORES} restores of step {good.step}"
            self._fail(run, ReplicasDifferError(f"{text}, {again}: {advice}"))
        self.restores += 1
        metrics = {f"device_{run.dp.mesh.devices.flat[place].id}": 1.0 for place in wrong}
        run.go_back(self._snapshot.restore(), good, text, metrics)

    def _replayed(
        self, run: Running, differences: list[UnequalCopies], done: Sequence[Dispatched]
    ) -> tuple[list[int], str]:
        """Return the devices that a replay from the last good state contradicts, and a description.

        A gradient that one replica computed from wrong weights was reduced into all replicas. So
        none may match the replay, but the right one is nearest, as it lacks the fault itself.
        """
        if self._snapshot is None or self._good is None:
            return [], "no state was kept to replay from"
        step = run.place.step
        # Until the next finite step, the whole state is unchanged.
        later = [step for call in run.dp.job.in_flight.remaining for step in call.steps()]
        for dispatched in reversed([*done, *later]):
            if not dispatched.not_finite:
                break
            step = dispatched.place.step - 1
        count = max(step - self._good.step, 0)
        steps = f"{count} steps" if count > 1 else "the step"
        source = f"a replay of {steps} since then" if count else "the last good state"
        replay = self._snapshot.restore()
        for batch in itertools.islice(batches_after(run, self._good), count):
            replay, _ = run.dp.step(replay, batch)
        if self._fingerprint.differences(self._fingerprint.take(replay)):
            return [], f"they differ again in {source}"
        votes, exact = votes_of(replay, self._fingerprint, differences, run.state)
        best = max(votes.values())
        wrong = sorted(place for place, count in votes.items() if count < best)
        if not wrong:
            return [], f"{source} is equally close to each"
        verb = "reproduces the bits of" if exact else "is closest to"
        return wrong, f"{source} {verb} {_names(run, sorted({*votes} - {*wrong}))}"

    def _text(
        self,
        run: Running,
        differences: list[UnequalCopies],
        wrong: Sequence[int],
        at: RunPosition,
        how: str = "",
    ) -> str:
        what = named(list(dict.fromkeys(each.leaf for each in differences)))
        when = f"after step {at.step}" if at.step else "before the first step"
        if self._good is not None:
            when += f"; all were equal after step {self._good.step}"
        if how:
            when += f"; {how}"
        if wrong:
            verb = "holds" if len(wrong) == 1 else "hold"
            return f"{_names(run, wrong)} {verb} wrong bits in {what} {when}"
        places = {place for each in differences for place in sum(each.groups, ())}
        names = _names(run, sorted(places))
        return f"{names} hold different bits in {what} {when}; which is right is unknown"

    def _fail(self, run: Running, error: Exception) -> NoReturn:
        # One that ends earlier would break what the others still read.
        run.dp.job.barrier("the result of an audit")
        raise error


def _outvoted(differences: list[UnequalCopies]) -> list[int]:
    return sorted({place for each in differences for place in each.wrong or ()})


def _names(run: Running, places: Sequence[int]) -> str:
    """Return a text such as `devices 4 and 5 of process 1`."""
    of: dict[int, list[str]] = {}
    for device in (run.dp.mesh.devices.flat[place] for place in places):
        of.setdefault(device.process_index, []).append(str(device.id))
    return listed(
        [f"device{'s' * (len(ids) > 1)} {listed(ids)} of process {p}" for p, ids in of.items()]
    )


def batches_after(run: Running, place: RunPosition) -> Iterator[Batch]:
    """Yield the batches of `run` again, from `place` on, endlessly."""
    yield from run.dp.feed(run.source, epoch=place.epoch, first=place.batch)
    for epoch in itertools.count(place.epoch + 1):
        yield from run.dp.feed(run.source, epoch=epoch)


def votes_of(
    replay: TrainState,
    fingerprint: Fingerprint,
    differences: Sequence[UnequalCopies],
    state: TrainState,
) -> tuple[dict[int, int], bool]:
    """Return per device the number of elements nearest to `replay`, and whether the best equal it.

    Only elements in which devices differ from each other are counted.
    """
    votes = {place: 0 for difference in differences for place in sum(difference.groups, ())}
    exact = True
    for difference in differences:
        held, again = (fingerprint.gather(of, difference.leaf) for of in (state, replay))
        places = [group[0] for group in difference.groups]
        distance = np.stack([_distance(held[place], again[place]) for place in places])
        apart = distance[:, (distance != distance[:1]).any(0)]
        exact &= not apart.min(0, initial=np.inf).any()
        nearest = (apart == apart.min(0)).sum(1)
        for group, count in zip(difference.groups, nearest, strict=True):
            votes |= {place: votes[place] + int(count) for place in group}
    return votes, exact


def _distance(held: np.ndarray, again: np.ndarray) -> Any:
    """Return each element's distance from its expected value; 0 only for identical bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(held.astype(np.complex128) - again.astype(np.complex128))
    apart = np.where(np.isnan(apart), np.inf, np.maximum(apart, np.finfo(np.float64).tiny))
    differ = held[..., None].view(np.uint8) != again[..., None].view(np.uint8)
    return np.where(differ.any(-1), apart, 0.0).reshape(-1)
