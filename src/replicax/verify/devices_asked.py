"""Detect a loss that queries the device or process count; comparing numbers cannot show it.

Both sides of a comparison run in one process and get the same answer.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import jax

from replicax.text.checks import FAIL, NOTE, Check

_COUNTS = ("device_count", "local_device_count", "process_count")
_QUERIES = {
    name: getattr(jax, name) for name in (*_COUNTS, "devices", "local_devices", "process_index")
}
_NAMES = {
    getattr(each, "__wrapped__", each).__code__: f"jax.{name}" for name, each in _QUERIES.items()
}
_LIBRARIES = frozenset({"equinox", "flax", "jax", "optax"})
_OURS = "replicax."
"""Replicax's own queries are allowed; recipes count as user code."""


@contextlib.contextmanager
def devices_asked() -> Iterator[list[str]]:
    """Record the device queries made by user code that is traced in this context."""
    found: list[str] = []

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code in _NAMES and _is_users(frame.f_back):
            found.append(_NAMES[frame.f_code])

    for each in _QUERIES.values():  # a cached answer would hide the call
        getattr(each, "cache_clear", lambda: None)()
    before = sys.getprofile()
    # A profiler written in C, such as cProfile, is not a function that setprofile accepts.
    resume = getattr(before, "enable", lambda: sys.setprofile(before))
    sys.setprofile(watch)
    try:
        yield found
    finally:
        resume()


def _is_users(frame: FrameType | None) -> bool:
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    ours = module.startswith(_OURS) and not module.startswith(f"{_OURS}recipes")
    return not ours and module.partition(".")[0] not in _LIBRARIES


def check_devices_asked(asked: Sequence[str]) -> Iterator[Check]:
    """Yield a row on the device queries of a loss or step, if there are any."""
    names = list(dict.fromkeys(asked))
    counted = [name for name in names if name.endswith("count")]
    others = [name for name in names if name not in counted]
    if counted:
        text = f"it calls {', '.join(f'{name}()' for name in counted)}"
        yield Check("parity", _CASE, FAIL, text, ON_DEVICES, {"asked": counted})
    elif others:
        text = f"it calls {', '.join(f'{name}()' for name in others)}: no result may depend on it"
        yield Check("parity", _CASE, NOTE, text, "", {"asked": others})


_CASE = "device queries"
ON_DEVICES = (
    "the loss or step depends on the number of devices, so one device and several give different "
    "results: Replicax takes the mean over all rows on any number of devices; remove the factor, "
    "or pass it as a number"
)
