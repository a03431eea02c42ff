"""A process's place as one engine tells it."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from replicax.cluster.address import DERIVED_PORTS, FIRST_DERIVED_PORT
from replicax.errors import ConfigError


@dataclass(frozen=True)
class Detected:
    """The place that one engine gives; `None` where it does not tell."""

    engine: str
    process: int | None
    processes: int | None
    coordinator: str | None = None
    job: str = ""
    local_process: int | None = None
    local_processes: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Field -> the variable that decided it, with its value."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Field -> one line saying what is missing and how to give it."""

    @property
    def is_complete(self) -> bool:
        """Whether it numbers the processes; another engine may still know the coordinator."""
        return self.process is not None and self.processes is not None

    @property
    def is_one_of_several(self) -> bool:
        """Whether it numbers more than one process."""
        return self.is_complete and self.processes != 1

    @property
    def numbering(self) -> str:
        """The variables that number the processes: `RANK=0 of WORLD_SIZE=2`."""
        return f"{self.reasons['process']} of {self.reasons['processes']}"


def whole_number(env: Mapping[str, str], name: str, least: int = 0) -> int:
    """The whole number that the variable `name` holds.

    Args:
        env: the environment; `name` must be set.
        name: the variable.
        least: the lowest value allowed.

    Raises:
        ConfigError: not a whole number, or below `least`.
    """
    text = env[name].strip()
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(
            f"{name}={env[name]!r} is not a whole number from {least}; "
            "the launcher sets it: correct or unset it"
        )
    return int(text)


def derived_port(job: str) -> int:
    """A port that every process of a job agrees on, and that other jobs rarely share."""
    return FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % DERIVED_PORTS


def said(env: Mapping[str, str], name: str) -> str:
    """`NAME=value`, as a reason."""
    return f"{name}={env[name]}"
