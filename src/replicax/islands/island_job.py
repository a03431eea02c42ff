"""The job of one island, and the job of all islands together."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicax.cluster.cluster_job import ClusterJob
from replicax.cluster.differences import field_differences, first_of
from replicax.core.ground.job import Parts, Value
from replicax.errors import AgreementError, ConfigError
from replicax.islands.group import Group

_NOTHING: Parts[Any] = Parts(0, lambda _: None, None, lambda _: [], lambda _: None)


class IslandJob:
    """A job that computes parts of each batch together with other islands.

    Its processes are those of this island. `everyone` is the job of all islands.
    """

    def __init__(self, inner: ClusterJob, group: Group) -> None:
        if inner.processes > 1:
            raise ConfigError(
                f"an island of {inner.processes} processes; an island has one process, with all "
                "devices that it sees: start more islands"
            )
        self.inner, self.group = inner, group
        self.place, self.process, self.processes = inner.place, inner.process, inner.processes
        self.in_flight = inner.in_flight
        self.everyone = Everyone(self)
        self.facts: dict[str, str] = {}
        """Digests, by topic, of what all islands must agree on before they exchange anything."""
        self._rehearses = False
        self.agree_on_text = inner.agree_on_text
        self.gather, self.broadcast = inner.gather, inner.broadcast
        self.barrier, self.unique = inner.barrier, inner.unique

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        self.inner.agree(topic, fields)
        text = json.dumps(fields, sort_keys=True, default=str)
        self.facts[topic] = hashlib.sha256(text.encode()).hexdigest()[:16]

    def move(self) -> None:
        self.inner.move()
        self.group.network.rests = False

    def rest(self) -> None:
        self.inner.rest()
        self.group.network.rests = True

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Enter a context in which this island computes one part, and takes it for all others."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def exchange(self, parts: Parts[Value], /) -> list[Value]:
        if self._rehearses:
            arrays = parts.to_host(parts.compute(0))
            values = [parts.from_host(arrays) for _ in range(parts.count)]
            return values if parts.add is None else [functools.reduce(parts.add, values)]
        if self.group.agreement.view is None:  # in a loop of the user's own
            self.group.enter({"facts": self.facts, "parts": parts.count}, has_state=True)
        return self.group.exchange(parts)[0]


class Everyone:
    """The members of all islands as a job: `process` is the rank among those that live."""

    exchange = None

    def __init__(self, job: IslandJob) -> None:
        self._job, self._group = job, job.group
        self.processes = len(job.group.place.addresses)
        self.in_flight = job.in_flight

    @property
    def process(self) -> int:
        return self._group.rank

    def gather(
        self,
        topic: str,
        value: Any,
        *,
        slow: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Any]:
        return self._group.exchange(_NOTHING, value, topic=topic, slow=slow)[1]

    def admit(self, topic: str, value: Any) -> list[Any]:
        """Do the same where new islands may join, and are members afterwards."""
        return self._group.exchange(_NOTHING, value, topic=topic, admits=True)[1]

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        if found := field_differences(self.gather(topic, dict(fields))):
            raise AgreementError(
                f"the islands disagree on {topic}: {first_of(found)}: "
                "start all with the same code, data and arguments"
            )

    def agree_on_text(self, topic: str, text: str) -> None:
        self.agree(topic, {"text": text})

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        return self.gather(topic, find() if self.process == 0 else None, slow=True)[0]

    def barrier(self, topic: str) -> None:
        self.gather(topic, None)

    def unique(self, topic: str) -> str:
        return self._job.unique(topic)

    def move(self) -> None:
        self._job.move()

    def rest(self) -> None:
        self._job.rest()
