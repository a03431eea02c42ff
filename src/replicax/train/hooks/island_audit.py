"""Comparison of the whole states of all islands, leaf by leaf, by checksums."""

import collections
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import numbers, whole_on_host
from replicax.core.ground.train_state import TrainState
from replicax.errors import IslandLeftError, ReplicasDifferError
from replicax.islands.island_job import IslandJob
from replicax.text.wording import counted, listed, named
from replicax.train.files.fingerprint import Fingerprint

_OWN = "own"
"""In place of the checksum of a leaf that an island has for itself."""


@dataclass(frozen=True)
class IslandVerdict:
    """The islands that hold another state than most, and the leaves that differ."""

    wrong: tuple[int, ...]
    """Indices of outvoted islands; without a majority, of all."""
    leaves: tuple[str, ...]
    has_majority: bool


def judge_islands(
    checksums: Mapping[int, Sequence[str]], leaves: Sequence[str]
) -> IslandVerdict | None:
    """Return who is outvoted by more than half; None if all are equal.

    `checksums` are those of `leaves`, by island; one that is empty equals none.
    """
    groups: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for island, sums in sorted(checksums.items()):
        alone = () if all(sums) else (str(island),)
        groups[(*sums, *alone)].append(island)
    if len(groups) == 1 and all(map(all, checksums.values())):
        return None
    right, most = max(groups.items(), key=lambda group: len(group[1]))
    if 2 * len(most) <= len(checksums) or not all(right):
        columns = zip(leaves, *checksums.values(), strict=True)
        differ = [leaf for leaf, *sums in columns if len(set(sums)) > 1 or not all(sums)]
        return IslandVerdict(tuple(sorted(checksums)), tuple(differ), False)
    wrong = tuple(sorted(set(checksums) - set(most)))
    differ = [
        leaf
        for number, leaf in enumerate(leaves)
        if any(checksums[island][number] != right[number] for island in wrong)
    ]
    return IslandVerdict(wrong, tuple(differ), True)


class IslandAudit:
    """Audits the state of this island, with the others of `job`.

    What islands have for themselves, with `rx.Rounds`, is compared only among the devices of each.
    `shards` is whether islands of some number of devices split leaves among these.
    """

    def __init__(self, job: IslandJob, fingerprint: Fingerprint, *, shards: bool) -> None:
        self._job, self._fingerprint, self._shards = job, fingerprint, shards
        self._own = job.island

    def compare(self, state: TrainState, table: jax.Array, step: int) -> str | None:
        """Compare the states of all islands after `step`; return a line if others have to leave.

        `table` has the fingerprints of `state`. All islands must call it at the same step; it waits
        for the devices.

        Raises:
            IslandLeftError: most islands hold another state than this one.
            ReplicasDifferError: no majority holds the same state.
        """
        sums = self._checksums(state, table)
        whole = hashlib.sha256("".join(sums).encode()).hexdigest() if all(sums) else ""
        states = self._job.everyone.gather("audit", [self._own, whole])
        if len({checksum for _, checksum in states}) == 1 and states[0][1]:
            return None
        # A few bytes suffice as long as all is well; now each leaf has its own.
        mine = [self._own, sums] if self._job.process == 0 else None
        gathered = self._job.everyone.gather("audit of each leaf", mine)
        every = dict(pair for pair in gathered if pair is not None)
        verdict = judge_islands(every, self._fingerprint.leaves)
        if verdict is None:
            gone = sorted({island for island, _ in states} - set(every))
            return f"audit: {_named(gone)} held another state after step {step}, and left"
        with contextlib.suppress(IslandLeftError):
            self._job.everyone.barrier("the result of an audit")  # all know it before one leaves
        who, what = _named(verdict.wrong), named(verdict.leaves)
        if not verdict.has_majority:
            self._job.finish()
            if len(verdict.wrong) == 1:
                raise ReplicasDifferError(
                    f"the devices of {who} hold different bits in {what} after step {step}, and no "
                    "other island is left: restart from a checkpoint, and test these devices"
                )
            raise ReplicasDifferError(
                f"{who} hold different bits in {what} after step {step}; which is right is "
                f"unknown without a majority: test these hosts, or use {len(every) + 1} islands"
            )
        verb = "holds" if len(verdict.wrong) == 1 else "hold"
        right = len(every) - len(verdict.wrong)
        fault = f"{who} {verb} wrong bits in {what} after step {step}"
        if self._own not in verdict.wrong:
            return f"audit: {fault}, and left: {right} of {counted(len(every), 'island')} go on"
        self._job.finish()
        error = IslandLeftError(
            f"{fault}, outvoted by {right} of {counted(len(every), 'island')}: start it again, "
            "which receives their state, and test this host if it recurs"
        )
        error.is_sound = False
        raise error

    def _checksums(self, state: TrainState, table: jax.Array) -> list[str]:
        """Return a checksum of each leaf; empty if this island's own devices differ in it."""
        differing = {each.leaf for each in self._fingerprint.differences(table)}
        first = np.asarray(table.addressable_data(0))[0]
        sums = []
        for leaf, name, row in zip(
            jax.tree.leaves(state), self._fingerprint.leaves, first, strict=True
        ):
            if name in differing:
                sums.append("")
            elif is_own(name):
                sums.append(_OWN)
            elif self._shards or not leaf.sharding.is_fully_replicated:
                sums.append(_sha256(leaf))  # the same for any number of devices
            else:
                sums.append(row.tobytes().hex())
        return sums


def is_own(leaf: str) -> bool:
    """Whether islands have a leaf of this name for themselves, so that it may differ."""
    return leaf.startswith("islands.")


def _named(islands: Sequence[int]) -> str:
    return listed([f"island {index}" for index in islands])


def _sha256(leaf: Any) -> str:
    host = np.ascontiguousarray(whole_on_host(numbers(leaf)))
    return hashlib.sha256(host.reshape(-1).view(np.uint8).data).hexdigest()[:24]
