"""Environment variables that tell a process its place in a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from replicax.errors import ConfigError

# Those that `replicax launch` sets; `Patience` has more.

PROCESS_ID = "REPLICAX_PROCESS_ID"
"""This process, from 0."""
PROCESSES = "REPLICAX_PROCESSES"
"""How many processes the job has."""
COORDINATOR = "REPLICAX_COORDINATOR"
"""`host:port` where process 0 listens for the others."""
JOB_ID = "REPLICAX_JOB_ID"
"""Any text; a process with another one is refused."""
LOCAL_DEVICES = "REPLICAX_LOCAL_DEVICES"
"""Which of the visible accelerators this process takes: `0,1`."""
FAILURE_FILE = "REPLICAX_FAILURE_FILE"
"""Where a process that fails writes why: see `replicax.cluster.failure`."""


class Fact(NamedTuple):
    """A part of a process's place."""

    value: Any
    reason: str
    """The variable that decided it, with its value where that is short: `RANK=3`."""


@dataclass(frozen=True)
class Detected:
    """The place that one engine gives."""

    engine: str
    facts: Mapping[str, Fact]
    """By their names: `process`, `processes`, `coordinator`, `job`, `local_process` and
    `local_processes`, as far as it tells."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """By the same names, one line saying what is missing and how to give it."""

    @property
    def numbers(self) -> tuple[int | None, int | None]:
        """Process and processes; `None` is what another engine may know."""
        process, processes = self.facts.get("process"), self.facts.get("processes")
        return process and process.value, processes and processes.value

    @property
    def numbering(self) -> str:
        """The variables that number the processes: `RANK=0 of WORLD_SIZE=2`."""
        return f"{self.facts['process'].reason} of {self.facts['processes'].reason}"


def whole_number(text: str, name: str, least: int = 0) -> int:
    """The whole number in `text`, which the variable or argument `name` holds."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
        raise ConfigError(
            f"{name}={text!r} is not a whole number from {least}: correct or unset it"
        )
    return int(digits)


def numbers(env: Mapping[str, str], **names: str) -> dict[str, Fact]:
    """The whole numbers of those variables that are set, by the parts of a place that they are."""
    found = {}
    for part, name in names.items():
        if name in env:
            number = whole_number(env[name], name, least=1 if part.endswith("processes") else 0)
            found[part] = Fact(number, f"{name}={env[name]}")
    return found
