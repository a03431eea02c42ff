"""Changes of a group of islands, and what one that joins receives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ReceivedState:
    """The state that a member gave to this island, and where the run is."""

    run: Any
    """JSON values."""
    arrays: list[np.ndarray]
    giver: int


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
