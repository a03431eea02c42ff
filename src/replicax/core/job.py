"""What the core asks of the other processes of a job, and the job of one process."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from replicax.core.in_flight import InFlight


class Job(Protocol):
    """The processes that compute together. All call its methods alike, in the same order."""

    @property
    def process(self) -> int:
        """Rank of this process, from 0."""

    @property
    def processes(self) -> int:
        """Number of processes."""

    @property
    def in_flight(self) -> InFlight:
        """Tracker of every step that this process gives to the devices."""

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        """Return once all processes have called this with equal `fields`.

        Args:
            topic: what they are about, in words.
            fields: JSON values and nested mappings of them.

        Raises:
            AgreementError: in every process, with the field and the processes that differ.
        """

    def gather(
        self,
        topic: str,
        value: Any,
        *,
        slow: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """All-gather: return `value` of every process, in order.

        Args:
            topic: what it is about, in words.
            value: what JSON can hold.
            slow: whether others may take an hour for theirs; by default as long as each may go
                without progress.
            cancelled: asked now and then; once it is true, the result is empty.
        """

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        """Return in every process what `find` returns in process 0, or raise what it raises there.

        Args:
            topic: what it is about, in words.
            find: called in process 0 alone; returns what JSON can hold.
        """

    def barrier(self, topic: str) -> None:
        """Wait for all processes: one that ends breaks what others still compute."""

    def unique(self, topic: str) -> str:
        """Return `topic` with a number: another one in each call, the same one in all processes."""

    def move(self) -> None:
        """Report progress, for the heartbeat."""

    def rest(self) -> None:
        """Report that no progress is to be expected until the next `move`."""


class Alone:
    """The job of one process."""

    process, processes = 0, 1

    def __init__(self) -> None:
        self.in_flight = InFlight()

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        pass

    def gather(
        self,
        topic: str,
        value: Any,
        *,
        slow: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Any]:
        return [value]

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        return find()

    def barrier(self, topic: str) -> None:
        pass

    def unique(self, topic: str) -> str:
        return topic

    def move(self) -> None:
        pass

    def rest(self) -> None:
        pass
