"""The job protocol that the core uses, and the job of a single process."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from replicax.core.ground.in_flight import InFlight
from replicax.core.ground.leaves import PyTree

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Parts(Generic[Value]):
    """The parts of a batch: each has a value, which any job that runs the same program computes."""

    count: int
    compute: Callable[[int], Value]
    """Returns the value of a part, counted from 0; it may be called again, in any order."""
    add: Callable[[Value, Value], Value] | None
    """Adds the values of two neighbours. None for values that are not added."""
    to_host: Callable[[Value], list[np.ndarray]]
    from_host: Callable[[list[np.ndarray]], Value]


class PartsExchange(Protocol):
    """Computes parts of a batch together with other jobs, which make the same calls in order."""

    def __call__(self, parts: Parts[Value], /) -> list[Value]:
        """Return the values of all parts, in order; or, if they are added, only their sum.

        The sum is that of a binary tree: neighbours first, then neighbouring pairs.
        """


class Peers(Protocol):
    """Other jobs that train the same state, each with a copy; all make the same calls in order."""

    count: int
    """Number of jobs, this one included."""

    @property
    def span(self) -> tuple[int, int]:
        """Rank of this job among those that live, from 0, and their number."""

    @property
    def exchange(self) -> PartsExchange | None:
        """Compute the parts of a batch together; None if each job computes rows of its own."""

    def share(
        self, arrays: list[np.ndarray], *, later: bool = False
    ) -> Callable[[], list[list[np.ndarray]]]:
        """Send arrays to all jobs; return a function that waits for those of each, by rank.

        All must call it in order. If `later`, they travel in the background.
        """

    def compare(self, about: str, arrays: PyTree) -> None:
        """Let the next exchange compare checksums of arrays that all jobs must have alike.

        Those of the same name that were not compared yet are forgotten.
        """


class Job(Protocol):
    """The processes that compute together. All must make the same method calls in the same order.

    `topic` describes the purpose of a call. Values must be JSON-serializable.

    Examples:
        >>> job = rx.initialize()
        >>> if job.process == 0:
        ...     print(job.processes)
        1
    """

    process: int
    """Rank of this process, from 0."""
    processes: int
    in_flight: InFlight
    """Tracker of all steps dispatched by this process."""

    @property
    def peers(self) -> Peers | None:
        """The jobs that this one trains with; None if there are none."""

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        """Return once all processes have called this with equal `fields`, nested or not.

        Otherwise raise `AgreementError` in all, naming the field and the processes that differ.
        """

    def agree_on_text(self, topic: str, text: str) -> None:
        """Return once all processes have called this with one program text.

        Otherwise raise `AgreementError` in all, with the first line that differs.
        """

    def gather(
        self,
        topic: str,
        value: Any,
        *,
        slow: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """All-gather: return the `value` of every process, in rank order.

        The timeout is the job's stall timeout, or an hour if `slow`. `cancelled` is polled; once it
        returns True, the result is empty.
        """

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        """Return, or raise, in all processes what `find` returns or raises in process 0."""

    def barrier(self, topic: str) -> None:
        """Wait for all processes: one that exits early breaks the computation of others."""

    def unique(self, topic: str) -> str:
        """Return `topic` with a number, unique per call and the same in all processes."""

    def move(self) -> None:
        """Report progress, for the heartbeat."""

    def rest(self) -> None:
        """Report that no progress is expected until the next `move`."""


class Alone:
    """The job of one process."""

    process, processes = 0, 1
    peers: Peers | None = None

    def __init__(self) -> None:
        self.in_flight = InFlight()

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None: ...
    def agree_on_text(self, topic: str, text: str) -> None: ...
    def barrier(self, topic: str) -> None: ...
    def move(self) -> None: ...
    def rest(self) -> None: ...

    def gather(self, topic: str, value: Any, **options: Any) -> list[Any]:
        return [value]

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        return find()

    def unique(self, topic: str) -> str:
        return topic


@dataclasses.dataclass
class ProcessJob:
    """Memory of the job that `rx.initialize()` joined in this process."""

    job: Job | None = None
    """The default of `DataParallel(job=)`; None in a process that trains alone."""


PROCESS_JOB = ProcessJob()
