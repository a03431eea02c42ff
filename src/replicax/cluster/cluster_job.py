"""The job that `initialize` returns: a single process, or several that exchange values."""

import collections
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from replicax import errors
from replicax.cluster.alike import compared_environment
from replicax.cluster.differences import field_differences, first_of
from replicax.cluster.link import Link
from replicax.cluster.place import Place
from replicax.core.ground.job import Alone, Peers
from replicax.errors import AgreementError, ReplicaxError

_SLOW_SECONDS = 3600.0
"""Timeout for a process that reads or writes a large checkpoint."""


class Lone(Alone):
    """Job of one process."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place


class Linked:
    """Job of several processes."""

    peers: Peers | None = None

    def __init__(self, place: Place, link: Link) -> None:
        self.place, self.link = place, link
        self.process, self.processes = link.process, link.processes
        self.in_flight = link.progress.in_flight
        self.move, self.rest = link.progress.move, link.progress.rest
        self._uses: collections.Counter[str] = collections.Counter()

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        if differences := field_differences(self.gather(topic, as_plain_fields(fields))):
            raise AgreementError(
                f"the processes disagree on {topic}: {first_of(differences)}: "
                "start all with the same code, data and arguments"
            )

    def agree_on_text(self, topic: str, text: str) -> None:
        self.agree(f"the environment of {topic}", compared_environment(os.environ))
        digests = self.gather(topic, hashlib.sha256(text.encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        lines = text.splitlines()
        # Only checksums travel: a program has many lines, of which one is shown.
        own_checksums = [zlib.crc32(line.encode()) for line in lines]
        checksums = self.gather(f"{topic}, line by line", own_checksums)
        shortest = min(map(len, checksums))
        differing = (n for n in range(shortest) if len({sums[n] for sums in checksums}) > 1)
        first = next(differing, shortest)
        line = lines[first].strip() if first < len(lines) else "its end"
        self.agree(f"the program of {topic}", {f"line {first + 1}": line})

    def gather(
        self,
        topic: str,
        value: Any,
        *,
        slow: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Any]:
        timeout = _SLOW_SECONDS if slow else None
        with self.in_flight.waiting():
            return self.link.gather(self.unique(topic), value, cancelled, timeout)

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        answer: dict[str, Any] = {}
        if self.process == 0:
            try:
                answer = {"value": find()}
            except ReplicaxError as error:  # raised in all: nobody waits for the next call
                answer = {"error": type(error).__name__, "text": str(error)}
        first = self.gather(topic, answer, slow=True)[0]
        if "error" in first:
            raise getattr(errors, first["error"])(first["text"])
        return first["value"]

    def barrier(self, topic: str) -> None:
        self.gather(topic, None)

    def unique(self, topic: str) -> str:
        self._uses[topic] += 1
        return f"{topic} ({self._uses[topic]})"


ClusterJob = Lone | Linked

_current: ClusterJob | None = None


def current_job() -> ClusterJob | None:
    """Return this process's job, for code that ends all of it: exceptions, signals, exit."""
    return _current


def set_job(job: ClusterJob | None) -> None:
    """Set the job of this process."""
    global _current
    _current = job


def as_plain_fields(fields: Any) -> Any:
    """Return `fields` after a round trip through JSON, so that tuples compare equal to lists.

    Other objects become their `str` without memory addresses, which differ between processes.
    """
    return json.loads(
        json.dumps(fields, default=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)))
    )
