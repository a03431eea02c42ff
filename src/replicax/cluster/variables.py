"""Environment variables that define a process's place in a job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from replicax.errors import ConfigError

# Set by `replicax launch`; `Timeouts` and `net/secret.py` have more.

PROCESS_ID = "REPLICAX_PROCESS_ID"
"""Rank of this process, from 0."""
PROCESSES = "REPLICAX_PROCESSES"
"""Number of processes of the job."""
COORDINATOR = "REPLICAX_COORDINATOR"
"""`host:port` where process 0 listens for the others."""
JOB_ID = "REPLICAX_JOB_ID"
"""Any text; a process with a different ID is rejected."""
LOCAL_DEVICES = "REPLICAX_LOCAL_DEVICES"
"""Indices of the visible accelerators that this process uses: `0,1`."""
CLUSTER = "REPLICAX_CLUSTER"
"""The name of one of JAX's methods to detect a job, which is then the only one: `mpi4py`."""
FAILURE_FILE = "REPLICAX_FAILURE_FILE"
"""Path of the failure report that a failing process writes: see `replicax.cluster.failure`."""


class Fact(NamedTuple):
    """A part of a process's place."""

    value: Any
    reason: str
    """Its source: a variable, with its value if that is short: `RANK=3`."""


@dataclass(frozen=True)
class Detected:
    """The place detected from one engine."""

    engine: str
    facts: Mapping[str, Fact]
    """By name: `process`, `processes`, `coordinator`, `job`, `local_process` and
    `local_processes`, as far as known."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Errors for missing facts, by the same names: what is missing and how to set it."""

    @property
    def numbers(self) -> tuple[int | None, int | None]:
        """Process and processes; `None` if unknown to this engine."""
        process, processes = self.facts.get("process"), self.facts.get("processes")
        return process and process.value, processes and processes.value

    @property
    def numbering(self) -> str:
        """The variables that number the processes: `RANK=0 of WORLD_SIZE=2`."""
        return f"{self.facts['process'].reason} of {self.facts['processes'].reason}"


def whole_number(text: str, name: str, least: int = 0) -> int:
    """Return the integer in `text`, the value of the variable or argument `name`."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
        raise ConfigError(
            f"{name}={text!r} is not an integer of at least {least}: correct or unset it"
        )
    return int(digits)


def set_integers(env: Mapping[str, str], **names: str) -> dict[str, Fact]:
    """Return the integers of the variables that are set, by their parts of a place."""
    facts = {}
    for part, name in names.items():
        if name in env:
            number = whole_number(env[name], name, least=1 if part.endswith("processes") else 0)
            facts[part] = Fact(number, f"{name}={env[name]}")
    return facts
