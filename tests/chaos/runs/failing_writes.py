"""Makes writes of checkpoints fail inside the job, by patching Python's calls."""

import builtins
import errno
import functools
import io
import os
import re
from collections.abc import Callable
from typing import Any

_SAVING = re.compile(r"\.saving-[^/]*")
STAGES = {
    "mkdir": [(os, "mkdir")],
    "open": [(builtins, "open"), (io, "open"), (os, "open")],
    "rename": [(os, "rename"), (os, "replace")],
}
"""Stage of a save -> the calls that fail."""


def install(wish: str) -> None:
    """Let saves fail as `ERRNO:SAVES:STAGE` says: `ENOSPC:2:open`; `""` is a healthy disk.

    A save is a folder of its own. The first SAVES of them never get through STAGE.
    """
    if not wish:
        return
    name, count, stage = wish.split(":")
    number, failing = getattr(errno, name), list[str]()

    def fails(path: Any) -> bool:
        try:
            found = _SAVING.search(os.fsdecode(path))
        except TypeError:  # a file descriptor
            return False
        if found is None:
            return False
        if found[0] not in failing and len(failing) < int(count):
            failing.append(found[0])
        return found[0] in failing

    for module, function in STAGES[stage]:
        setattr(module, function, _failing(getattr(module, function), fails, number))


def _failing(call: Callable[..., Any], fails: Callable[[Any], bool], number: int) -> Any:
    @functools.wraps(call)
    def wrapped(path: Any, *arguments: Any, **named: Any) -> Any:
        if not _only_reads(call.__name__, *arguments) and fails(path):
            raise OSError(number, os.strerror(number), os.fsdecode(path))
        return call(path, *arguments, **named)

    return wrapped


def _only_reads(call: str, how: Any = 0, *arguments: Any) -> bool:
    """Return whether an `open` with the mode or the flags `how` only reads."""
    if call != "open":
        return False
    return how & os.O_ACCMODE == os.O_RDONLY if isinstance(how, int) else how in ("r", "rb")
