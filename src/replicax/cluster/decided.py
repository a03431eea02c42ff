"""What process 0 finds out alone, known to all processes; and where they wait for each other."""

from collections.abc import Callable
from typing import Any

from replicax import errors
from replicax.cluster.link import current_link
from replicax.errors import ReplicaxError

LONGEST_SECONDS = 3600.0
"""That process 0 may take for it: reading a large checkpoint back, say."""


def decided(topic: str, find: Callable[[], Any]) -> Any:
    """What `find` returns in process 0, in every process; its error too, where it is Replicax's.

    Args:
        topic: of all calls, in words.
        find: called in process 0 alone; returns what JSON can hold.
    """
    link = current_link()
    if link is None:
        return find()
    found: dict[str, Any] = {}
    if link.process == 0:
        try:
            found = {"value": find()}
        except ReplicaxError as error:
            found = {"error": type(error).__name__, "text": str(error)}
    told = link.gather(link.unique(topic), found, patience_seconds=LONGEST_SECONDS)[0]
    if "error" in told:
        raise getattr(errors, told["error"])(told["text"])
    return told["value"]


def meet(topic: str) -> None:
    """Wait until all processes have come as far: one that ends breaks what others still compute."""
    link = current_link()
    if link is not None:
        link.gather(link.unique(topic), None)
