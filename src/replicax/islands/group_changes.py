"""Changes of a group of islands, and what one that joins receives."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax.islands.messages import State, View


@dataclasses.dataclass(frozen=True)
class GroupChange:
    """A change of the group."""

    time: float
    """Seconds since 1970."""
    exchange: int
    joined: Sequence[int]
    left: Sequence[int]
    members: Sequence[int]
    why: str


class GroupChanges:
    """The changes of a group that nobody has taken yet."""

    def __init__(self) -> None:
        self.members: list[int] = []
        """Indices of the members after the last change."""
        self.why: dict[int, str] = {}
        """Why an island was lost, by index."""
        self._untaken: list[GroupChange] = []

    def begin(self, view: View) -> None:
        """Forget the changes before `view`."""
        self.members, self._untaken = [index for index, _ in view.members], []

    def note(self, view: View, exchange: int) -> bool:
        """Note what changed up to `view`; return whether anything did."""
        members = [index for index, _ in view.members]
        if members == self.members:
            return False
        joined = [index for index in members if index not in self.members]
        left = [index for index in self.members if index not in members]
        why = "; ".join(f"island {index}: {self.why.get(index, 'lost')}" for index in left)
        self._untaken.append(GroupChange(time.time(), exchange, joined, left, members, why))
        self.members = members
        return True

    def taken(self) -> list[GroupChange]:
        """Return the changes since the last call."""
        changes, self._untaken = self._untaken, []
        return changes


@dataclasses.dataclass(frozen=True)
class ReceivedState:
    """The state that a member gave to this island, and where the run is."""

    run: Any
    """JSON values."""
    arrays: list[np.ndarray]


def packed_state(
    view: View, exchange: int, run: Any, arrays: Sequence[np.ndarray]
) -> tuple[State, list[np.ndarray]]:
    """Return what a new member receives; `run` is JSON values of any length."""
    sent = packed_run(run, arrays)
    return State(view, exchange, _sha256(sent)), sent


def unpacked_state(header: State, arrays: list[np.ndarray]) -> ReceivedState | None:
    """Return what `packed_state` was given; None if it is damaged."""
    return unpacked_run(arrays) if _sha256(arrays) == header.sha256 else None


def packed_run(run: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays, after one with the JSON of `run`."""
    return [np.frombuffer(json.dumps(run).encode(), np.uint8), *arrays]


def unpacked_run(arrays: Sequence[np.ndarray]) -> ReceivedState:
    """Return what `packed_run` was given."""
    return ReceivedState(json.loads(arrays[0].tobytes()), list(arrays[1:]))


def _sha256(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
