"""In the job: one of the product's defences switched off, to see that a trial misses it."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Defence:
    """Something that keeps a run whole."""

    what: str
    fault: str
    """The kind of fault that it is there for."""
    off: Callable[[], None]


DEFENCES: dict[str, Defence] = {}


def switch_off(name: str) -> None:
    """Patch the product in this process so that `name` is not there; `""` leaves it whole."""
    if name:
        DEFENCES[name].off()
