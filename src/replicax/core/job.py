"""The processes of a job as the core asks them, and the job of one process."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from replicax.core.in_flight import InFlight


class Job(Protocol):
    """The processes that compute together. All call its methods alike, in the same order.

    A `topic` says in words what a call is about. Values are what JSON can hold.

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
    """Tracker of every step that this process gives to the devices."""

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        """Return once all processes have called this with equal `fields`, nested or not.

        Else raise `AgreementError` in all, with the field and the processes that differ.
        """

    def agree_on_text(self, topic: str, text: str) -> None:
        """Do the same with the text of a program; the error names the first line that differs."""

    def gather(
        self,
        topic: str,
        value: Any,
        *,
        slow: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """All-gather: return `value` of every process, in order.

        Others have as long as each may go without progress, or an hour if `slow`. `cancelled` is
        asked now and then; once it is true, the result is empty.
        """

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        """Return in all processes what `find` returns, or raise what it raises, in process 0."""

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
