"""What a compiler is asked, and what came of it."""

import dataclasses
import re
from typing import Any

from replicax.analysis.compiled import Memory

NOT_INSTALLED, WRONG_VERSION = "not installed", "wrong version"

_TOTAL = re.compile(
    r"(?:Used|HLO temporaries \() ?([\d.]+)([KMGT]?)\)? (?:of|exceeds available HBM \() ?"
    r"([\d.]+)([KMGT]?)"
)


@dataclasses.dataclass(frozen=True)
class Description:
    """Devices to compile for."""

    platform: str
    devices: int
    topology: dict[str, Any]
    """Arguments of `jax.experimental.topologies.get_topology_desc`; none for host devices."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """That a compiler has described the devices."""

    name: str
    """Its package, and the version."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """What a compiler says where it cannot do a target or a step, in one line."""

    message: str
    reason: str = ""
    """`NOT_INSTALLED`, `WRONG_VERSION`, or any other."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled step, read and let go."""

    memory: Memory
    """On one device."""
    text: str
    """The optimised module in XLA's language, in the order of its schedule."""
    seconds: float
    """That compiling took."""


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A step that the compiler refuses for the memory of its target."""

    needed_bytes: int | None
    """On one device, where the compiler says it. It may stop at the first sum that is too much, so
    the step can need more."""
    available_bytes: int | None
    message: str
    """Of the compiler, its first line."""
    seconds: float


def too_large(message: str, seconds: float) -> TooLarge | None:
    """What a compiler's message tells of memory; None where it is about something else.

    Args:
        message: of the exception that compiling raised.
        seconds: that it took.
    """
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    sizes = _TOTAL.search(message)
    if sizes is None:
        return TooLarge(None, None, line, seconds)
    return TooLarge(_bytes(sizes[1], sizes[2]), _bytes(sizes[3], sizes[4]), line, seconds)


def _bytes(number: str, prefix: str) -> int:
    """XLA's prefixes are powers of 1024."""
    return round(float(number) * 2.0 ** (10 * " KMGT".index(prefix or " ")))
