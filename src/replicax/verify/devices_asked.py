"""A loss that asks how many devices or processes there are: no comparison of numbers shows it.

Both sides of a comparison run in one process, and are given the same answer.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import jax

from replicax.checks import FAIL, NOTE, Check

_COUNTS = (jax.device_count, jax.local_device_count, jax.process_count)
_OTHERS = (jax.devices, jax.local_devices, jax.process_index)
_NAMES = {
    getattr(each, "__wrapped__", each).__code__: f"jax.{each.__name__}"
    for each in (*_COUNTS, *_OTHERS)
}
_LIBRARIES = frozenset({"equinox", "flax", "jax", "optax"})
_OURS = "replicax."
"""Ours ask for the devices where they have to; a recipe is as a user's."""


@contextlib.contextmanager
def devices_asked() -> Iterator[list[str]]:
    """Note the functions that users' code, traced meanwhile, asks for devices with."""
    found: list[str] = []

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code in _NAMES and _is_users(frame.f_back):
            found.append(_NAMES[frame.f_code])

    for each in (*_COUNTS, *_OTHERS):  # an answer that is kept would not be seen
        getattr(each, "cache_clear", lambda: None)()
    before = sys.getprofile()
    # A profiler of C, such as cProfile's, is no function that could be set again.
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
    """Yield a row on what a loss or step asked for, where it did."""
    names = list(dict.fromkeys(asked))
    counted = [name for name in names if name.endswith("count")]
    others = [name for name in names if name not in counted]
    if counted:
        text = f"it asks {', '.join(f'{name}()' for name in counted)}"
        yield Check("parity", CASE, FAIL, text, ON_DEVICES, {"asked": counted})
    elif others:
        text = f"it asks {', '.join(f'{name}()' for name in others)}: let no number follow from it"
        yield Check("parity", CASE, NOTE, text, "", {"asked": others})


CASE = "devices asked for"
ON_DEVICES = (
    "the loss or step follows from how many devices there are, and gives other numbers on one than "
    "on several: Replicax takes the mean over all rows, on however many; take the factor out, or "
    "give it as a number"
)
