"""Who holds a run: a start's host and process, as its lease file tells them."""

import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

LONGEST_BYTES = 4096
"""Of a lease file; a longer one is none."""

_LATEST = 2.0**35
"""Unix time; beyond it some systems have no calendar."""

_EXITING = 0x4
"""PF_EXITING of Linux's sched.h: the process is being taken down, and may still hold locks."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process of one start that holds the run."""

    token: int
    """Which start of the run it is, from 1."""
    host: str
    boot_id: str | None
    """Of the host's running kernel; None where the system tells none."""
    pid: int
    process_started: int | None
    """Clock ticks after the boot, as process ids come again; None where the system tells none."""
    started_at: float
    """Unix time, by the host's own clock."""

    @classmethod
    def this_process(cls, token: int) -> "Holder":
        """This process as start `token`."""
        host, boot_id = this_host()
        pid = os.getpid()
        return cls(token, host, boot_id, pid, _started(pid), round(time.time(), 3))

    def to_json(self) -> bytes:
        """One line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @property
    def is_on_this_host(self) -> bool:
        """Whether this host has been its host, and has not been booted since."""
        return (self.host, self.boot_id) == this_host()

    @property
    def is_running(self) -> bool:
        """Whether the system says so of a process on this host; False where it does not tell."""
        return self.process_started is not None and _started(self.pid) == self.process_started

    def __str__(self) -> str:
        since = time.localtime(self.started_at)
        today = since[:3] == time.localtime()[:3]
        at = time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", since)
        return f"start {self.token}, host {self.host}, pid {self.pid}, since {at}"


def parse_holder(content: bytes, token: int) -> Holder | None:
    """What a lease file says of start `token`; None where no start has written it."""
    if len(content) > LONGEST_BYTES:
        return None
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return None
    names = [field.name for field in dataclasses.fields(Holder)]
    if not isinstance(fields, dict) or sorted(fields) != sorted(names):
        return None
    holder = Holder(**fields)
    valid = (
        type(holder.token) is int
        and holder.token == token
        and _is_word(holder.host)
        and (holder.boot_id is None or _is_word(holder.boot_id))
        and _is_count(holder.pid)
        and (holder.process_started is None or _is_count(holder.process_started))
        and type(holder.started_at) in (int, float)
        and 0 <= holder.started_at < _LATEST
    )
    return holder if valid else None


def this_host() -> tuple[str, str | None]:
    """The host's name, and the id of its boot where the system has one."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        boot_id = ""
    return socket.gethostname(), boot_id or None


def _started(pid: int) -> int | None:
    """When process `pid` began, in clock ticks after the boot; None where it has ended, or ends."""
    try:
        # From proc(5). The command before the bracket may itself hold brackets and blanks.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        state, flags, started = fields[0], int(fields[6]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
    return None if state in (b"Z", b"X") or flags & _EXITING else started


def _is_word(value: Any) -> bool:
    # Printed as it is: neither a line break nor what moves a terminal's cursor.
    return type(value) is str and 0 < len(value) <= 255 and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
