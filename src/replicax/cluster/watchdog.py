"""Detect the process that blocks the others, to end the job instead of hanging.

Each process reports its progress in heartbeats; process 0 compares them with the timeouts.
"""

import collections
import dataclasses
import math
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

from replicax.core.ground.in_flight import InFlight
from replicax.errors import ConfigError
from replicax.net.message import Typed
from replicax.text.arguments import Positive, typed

SAVED = 75
"""The exit code of a process that stopped early with everything saved."""
NO_LIMIT_SECONDS = sys.float_info.max
"""An infinite timeout; JSON has no infinity."""
_STEP_TIMES = 100
"""Number of recent step times kept; their median is the usual step time."""
_UNHEARD_SECONDS = 2.0
"""Time without heartbeats that is reported about a blamed process; the interval is 1 s."""


@typed
@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Timeouts after which a process counts as stuck, with the variables that set them.

    Examples:
        >>> job = rx.initialize(patience=rx.types.Timeouts(stall_seconds=300))
    """

    stall_multiple: Positive = 10.0
    """Timeout of a step, as a multiple of the median step time [REPLICAX_STALL_MULTIPLE]."""
    stall_seconds: Positive = 60.0
    """Minimum timeout of a step [REPLICAX_STALL_SECONDS]."""
    start_seconds: Positive = 1800.0
    """Timeout until the first step is done, and during compilation
    [REPLICAX_START_SECONDS]."""
    silent_seconds: Positive = 30.0
    """Timeout for heartbeats; a process without one is frozen or unreachable
    [REPLICAX_SILENT_SECONDS]. Below JAX's own 100 s, which end in an abort."""

    @property
    def beat_seconds(self) -> float:
        """Interval between heartbeats."""
        return min(1.0, self.silent_seconds / 8)

    def allowed(self, usual_seconds: float | None) -> float:
        """Return how long a process may make no progress if its steps take `usual_seconds`."""
        if usual_seconds is None:
            return self.start_seconds
        return max(self.stall_seconds, self.stall_multiple * usual_seconds)


def read_timeouts(env: Mapping[str, str]) -> Timeouts:
    """Return the timeouts in `env`, else the defaults; `ConfigError` if one is not positive."""
    timeouts = {}
    for field in dataclasses.fields(Timeouts):
        name = f"REPLICAX_{field.name.upper()}"
        if name not in env:
            continue
        try:
            timeouts[field.name] = float(env[name])
        except ValueError:
            timeouts[field.name] = math.nan
        if not timeouts[field.name] > 0:
            raise ConfigError(f"{name}={env[name]}; it must be above 0: correct or unset it")
    return Timeouts(**timeouts)


class Heartbeat(Typed):
    """Progress of a process, sent to process 0."""

    begun: int = 0
    """Steps dispatched, or being dispatched. The process with the fewest blocks the others."""
    finished: int = 0
    """Steps that the devices are known to have finished."""
    doing: str = "starting"
    """`starting`, `stepping`, `compiling`, `in a callback`, `idle`."""
    seconds: float = 0.0
    """Time since its last progress."""
    allowed_seconds: float = NO_LIMIT_SECONDS
    """Timeout for progress; unlimited until the first report."""

    def __str__(self) -> str:
        steps = f"has begun {self.begun} steps and finished {self.finished}"
        return f"{steps}, {self.doing} for {self.seconds:.1f} s"


class LoopProgress:
    """The progress of this process, written by its training loop and read by its link."""

    def __init__(self, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self._idle = False
        self._moved_at = time.monotonic()
        self._finished = 0, self._moved_at
        """Steps that the devices have finished, and when that was noticed."""
        self._step_times: collections.deque[float] = collections.deque(maxlen=_STEP_TIMES)
        self._lock = threading.Lock()

    def move(self) -> None:
        """Report progress: a step was begun, or a batch evaluated."""
        self._idle = False
        self._moved_at = time.monotonic()
        self._update()  # a loop may get stuck before two heartbeats

    def rest(self) -> None:
        """Report that the loop is over, or has not begun: no timeout applies."""
        self._idle = True
        self._moved_at = time.monotonic()

    def exclude(self, seconds: float) -> None:
        """Exclude `seconds` during which the whole process was frozen."""
        now = time.monotonic()
        self._moved_at = min(now, self._moved_at + seconds)  # it may have moved since

    def heartbeat(self, timeouts: Timeouts) -> Heartbeat:
        """Return the current progress."""
        finished, noticed_at = self._update()
        begun = max(self.in_flight.entered, self.in_flight.begun)
        seconds = time.monotonic() - max(self._moved_at, noticed_at)
        doing = "idle" if self._idle else "stepping" if begun else "starting"
        if not self._idle and seconds > 1.0:  # walking all stacks takes long in a large program
            doing = _activity() or doing
        step_times = list(self._step_times)  # another thread may add to them
        allowed = timeouts.allowed(statistics.median(step_times) if step_times else None)
        if doing in ("compiling", "starting"):
            allowed = max(allowed, timeouts.start_seconds)
        return Heartbeat(begun, finished, doing, seconds, min(allowed, NO_LIMIT_SECONDS))

    def _update(self) -> tuple[int, float]:
        """Return the number of finished steps, and when that was noticed; record the step time.

        A host runs ahead of its devices, and then waits for many steps at once: only finished
        steps show progress and how long a step takes.
        """
        with self._lock:
            finished, now = self.in_flight.finished, time.monotonic()
            before, noticed_at = self._finished
            if finished > before:
                if before:  # the first step includes its compilation
                    self._step_times.append((now - noticed_at) / (finished - before))
                self._finished = finished, now
            return self._finished


def _activity() -> str | None:
    """Return the activity of this process if its stack traces show it."""
    files = {
        frame.f_code.co_filename
        for stack in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(stack)
    }
    for path, doing in (
        ("jax/_src/compiler", "compiling"),
        ("jax/_src/callback", "in a callback"),
    ):
        if any(path in file for file in files):
            return doing
    return None


@dataclasses.dataclass
class Member:
    """A process as seen by process 0. Times are on process 0's clock, in seconds."""

    process: int
    host: str
    pid: int
    heard_at: float
    heartbeat: Heartbeat = dataclasses.field(default_factory=Heartbeat)
    ended: bool = False
    """Whether it has reported that it is done; nothing more is expected of it."""

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"

    def state(self, now: float) -> str:
        """Say at which step it is, or since when it is silent."""
        if self.ended:
            return f"{self}, which ended after step {self.heartbeat.begun}"
        unheard = now - self.heard_at
        if unheard > _UNHEARD_SECONDS:
            silent = f"sent no heartbeat for {unheard:.0f} s"
            return f"{self}, which {silent}: frozen, or network failure"
        return f"{self}, which {self.heartbeat}"


@dataclasses.dataclass
class Waiting:
    """Values that processes have sent for a topic, while they wait for the others'."""

    since: float
    values: dict[int, str] = dataclasses.field(default_factory=dict)
    timeout_seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    """Timeout requested by each process, if longer than the default."""


class StuckVerdict(Typed):
    """Why all processes stop."""

    reason: str
    blames: Sequence[int]
    stacks: bool = False
    """Whether each process prints its stack traces."""
    code: int = 1
    """Exit code of each process; `SAVED` if none has failed."""


def find_stuck(
    members: Mapping[int, Member], waiting: Mapping[str, Waiting], now: float, silent_seconds: float
) -> StuckVerdict | None:
    """Return which processes are stuck or silent; None if none is. `waiting` is by topic."""
    running = [member for member in members.values() if not member.ended]
    # These first, as the steps that they reported are old.
    silent = [member for member in running if now - member.heard_at > silent_seconds]
    if silent:
        seconds = max(now - member.heard_at for member in silent)
        return _blame(
            f"{', '.join(map(str, silent))} sent no heartbeat for {seconds:.0f} s, last at step "
            f"{silent[0].heartbeat.begun}: frozen, out of memory, or network failure",
            silent,
        )
    for topic, gather in waiting.items():
        missing = [member for process, member in members.items() if process not in gather.values]
        allowed = max(member.heartbeat.allowed_seconds for member in missing)
        timeout = max([allowed, *gather.timeout_seconds.values()])
        seconds = now - gather.since
        if all(member.ended for member in missing) or seconds > timeout:
            waited = f"the others have waited {seconds:.0f} s for {topic}"
            return _blame(f"{waited} from {_states(missing, now)}", missing)
    busy = [member for member in running if member.heartbeat.doing != "idle"]
    ahead = max((member.heartbeat.begun for member in busy), default=0)
    ended_behind = [m for m in members.values() if m.ended and m.heartbeat.begun < ahead]
    if ended_behind:
        they = f"the others, at step {ahead}, wait for {_states(ended_behind, now)}"
        return _blame(f"{they}: all must take the same number of steps", ended_behind)
    timeout = max((member.heartbeat.allowed_seconds for member in busy), default=0.0)
    seconds = max((member.heartbeat.seconds for member in busy), default=0.0)
    if seconds > timeout:
        return _stalled(list(members.values()), seconds, timeout, now)
    return None


def _stalled(members: Sequence[Member], seconds: float, timeout: float, now: float) -> StuckVerdict:
    """Blame the processes that have begun the fewest steps; among equals, those in a callback."""
    fewest = min(member.heartbeat.begun for member in members)
    behind = [member for member in members if member.heartbeat.begun == fewest]
    if len(behind) > 1:
        behind = [m for m in behind if m.heartbeat.doing == "in a callback"] or behind
    stalled = f"no step for {seconds:.0f} s (timeout {timeout:.0f} s)"
    if len(behind) == len(members):
        return _blame(f"{stalled}; all processes are at step {fewest}", [])
    farthest = max(member.heartbeat.begun for member in members)
    they = f"the others, at step {farthest}, wait for {_states(behind, now)}"
    return _blame(f"{stalled}: {they}", behind)


def _blame(reason: str, members: Sequence[Member]) -> StuckVerdict:
    return StuckVerdict(reason, [member.process for member in members], stacks=True)


def _states(members: Sequence[Member], now: float) -> str:
    return "; ".join(member.state(now) for member in members)
