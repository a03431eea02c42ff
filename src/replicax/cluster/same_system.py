"""Processes of the same running system, of which one can tell whether another is gone."""

import os
import time
from pathlib import Path

_EXITING = 0x4  # PF_EXITING in Linux's sched.h: a killed process that is still freeing its memory
_ENDS_TRIES, _ENDS_SECONDS = 30, 0.01


def boot() -> str:
    """Return what differs between hosts, their starts, and containers with own process IDs.

    Empty where processes cannot be seen.
    """
    try:
        Path("/proc/1/stat").read_bytes()  # else other users' processes are hidden
        running = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{running} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> int | None:
    """Return when a process of this system began, in clock ticks since boot.

    With `pid`, which is used again, it names the process. None if it has ended, or is about to
    without running again.
    """
    try:
        # See proc(5). The command before the bracket may itself contain brackets and spaces.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    ends = fields[0] in (b"Z", b"X") or int(fields[6]) & _EXITING
    return None if ends else int(fields[19])


def ends_at_once(pid: int) -> bool:
    """Whether a process of this system has ended, or does so within a moment."""
    for _ in range(_ENDS_TRIES):  # its connections end before the process does
        if started(pid) is None:
            return True
        time.sleep(_ENDS_SECONDS)
    return False
