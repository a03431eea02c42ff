"""The parts of an exchange in an island of several processes: the first decides, all compute.

Only the first process is connected to other islands. What it asks of its `LocalParts` it tells the
others, which ask the same of theirs: all dispatch the same programs in the same order.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from replicax.core.ground.job import Job, Parts, Value
from replicax.islands.frames import EXCHANGED_DTYPES
from replicax.islands.group_changes import ReceivedState, packed_run, unpacked_run
from replicax.islands.local_parts import BlockArrays, LocalParts
from replicax.islands.parts import Block

_TOPIC = "the parts of a batch"
_PIECE_BYTES = 1 << 26


class LeadingParts(LocalParts[Value]):
    """The parts in the first process of an island; the others follow it (`follow_first`).

    `told` returns what they are told when the exchange is complete, in JSON. While this one waits
    for other islands, no progress of the job is expected.
    """

    def __init__(
        self,
        parts: Parts[Value],
        note: Callable[[int], None],
        *,
        job: Job,
        told: Callable[[], Any],
    ) -> None:
        super().__init__(_shared(parts, job), note)
        self._job, self._told = job, told
        job.rest()

    def missing(self, chosen: Collection[int]) -> tuple[list[Any], list[np.ndarray]]:
        self._job.move()
        self._tell({"chosen": sorted(chosen), "sent": sorted(self._sent)})
        return super().missing(chosen)

    def sent(self, blocks: Collection[Block]) -> None:
        super().sent(blocks)
        self._job.rest()

    def result(self, values: BlockArrays) -> list[Value]:
        self._job.move()
        kinds = [[block, _kinds(arrays)] for block, arrays in values.items()]
        self._tell({"values": kinds, "told": self._told()})
        return super().result(values)

    def _tell(self, command: dict[str, Any]) -> None:
        self._job.broadcast(_TOPIC, lambda: command)


def follow_first(parts: Parts[Value], job: Job) -> tuple[list[Value], Any]:
    """Compute the parts that the first process names; return its result, and what it told last.

    Raises what the first process raised, if it left the others.
    """
    local = LocalParts(_shared(parts, job), lambda _: None)
    while True:
        job.rest()
        command = job.broadcast(_TOPIC, lambda: None)
        job.move()
        if "chosen" in command:
            local.sent([(first, size) for first, size in command["sent"]])
            local.missing(command["chosen"])
        else:
            values = {(first, size): _empty(of) for (first, size), of in command["values"]}
            return local.result(values), command["told"]


def fail_followers(error: Exception, job: Job) -> None:
    """Raise `error` in all processes that follow this one, and here."""

    def find() -> None:
        raise error

    job.broadcast(_TOPIC, find)


def shared_state(received: ReceivedState | None, job: Job) -> ReceivedState | None:
    """Return in all processes the state, or None, that the first has received."""
    packed = None if received is None else packed_run(received.run, received.arrays)
    kinds = job.broadcast("the state of the run", lambda: _kinds(packed))
    arrays = packed if job.process == 0 else _empty(kinds)
    return None if arrays is None else unpacked_run(_broadcast(arrays, job))


def shared_lists(lists: list[list[np.ndarray]] | None, job: Job) -> list[list[np.ndarray]]:
    """Return in all processes the arrays that the first has found; None in the others."""
    kinds = job.broadcast("arrays of all islands", lambda: [_kinds(each) for each in lists or ()])
    given = lists or [_empty(each) or [] for each in kinds]
    return [_broadcast(each, job) for each in given]


def _shared(parts: Parts[Value], job: Job) -> Parts[Value]:
    """Return `parts` whose arrays from other islands are those of the first process."""
    return replace(parts, from_host=lambda arrays: parts.from_host(_broadcast(arrays, job)))


def _broadcast(arrays: Sequence[np.ndarray], job: Job) -> list[np.ndarray]:
    """Return the arrays of process 0, bit for bit; those of the others have the same kinds."""
    job.in_flight.drain()  # two programs that communicate may deadlock: see `InFlight.meet`
    return [_same_in_all(np.asarray(array)) for array in arrays]


def _same_in_all(array: np.ndarray) -> np.ndarray:
    """Broadcast an array a few bytes at a time, as each device holds a piece twice."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = np.empty_like(data)
    for start in range(0, data.size, _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        # As integers: they are added to zeros, which -0.0 would not survive.
        words = np.pad(piece, (0, -piece.size % 4)).view(np.uint32)
        same = np.asarray(multihost_utils.broadcast_one_to_all(words)).view(np.uint8)
        whole[start : start + piece.size] = same[: piece.size]
    return whole.view(array.dtype).reshape(array.shape)


def _kinds(arrays: Sequence[np.ndarray] | None) -> list[Any] | None:
    """Return the dtype name and shape of each array."""
    if arrays is None:
        return None
    return [[array.dtype.name, array.shape] for array in map(np.asarray, arrays)]


def _empty(kinds: Sequence[Any] | None) -> list[np.ndarray] | None:
    if kinds is None:
        return None
    return [np.zeros(shape, EXCHANGED_DTYPES[name]) for name, shape in kinds]
