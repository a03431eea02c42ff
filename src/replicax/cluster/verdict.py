"""Detect the process that blocks the others, to end the job instead of hanging."""

import dataclasses
from collections.abc import Mapping, Sequence

from replicax.cluster.message import Typed
from replicax.cluster.pulse import Standing

SAVED = 75
"""The exit code of a process that stopped early with everything saved."""

_UNHEARD_SECONDS = 2.0
"""Time without heartbeats that is reported about a blamed process; the interval is 1 s."""


@dataclasses.dataclass
class Member:
    """A process as seen by process 0. Times are on process 0's clock, in seconds."""

    process: int
    host: str
    pid: int
    heard_at: float
    standing: Standing = dataclasses.field(default_factory=Standing)
    ended: bool = False
    """Whether it has reported that it is done; nothing more is expected of it."""

    def __str__(self) -> str:
        return f"process {self.process} ({self.host}, pid {self.pid})"


@dataclasses.dataclass
class Waiting:
    """Values that processes have sent for a topic, while they wait for the others'."""

    since: float
    values: dict[int, str] = dataclasses.field(default_factory=dict)
    patience_seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    """Timeout requested by each of them, if longer than the default."""


class Verdict(Typed):
    """Why all processes stop."""

    reason: str
    blames: Sequence[int]
    stacks: bool = False
    """Whether each process prints its stack traces."""
    code: int = 1
    """Exit code of each process; `SAVED` if none has failed."""


def judge(
    members: Mapping[int, Member], waiting: Mapping[str, Waiting], now: float, silent_seconds: float
) -> Verdict | None:
    """Return which processes are stuck or silent; None if none is. `waiting` is by topic."""
    running = [member for member in members.values() if not member.ended]
    silent = [member for member in running if now - member.heard_at > silent_seconds]
    if silent:
        seconds = max(now - member.heard_at for member in silent)
        return Verdict(
            f"{', '.join(map(str, silent))} sent no heartbeat for {seconds:.0f} s, last at step "
            f"{silent[0].standing.begun}: frozen, out of memory, or network failure",
            [member.process for member in silent],
            stacks=True,
        )
    for topic, those in waiting.items():
        missing = [member for process, member in members.items() if process not in those.values]
        allowed = max(member.standing.allowed_seconds for member in missing)
        patience = max([allowed, *those.patience_seconds.values()])
        if all(member.ended for member in missing) or now - those.since > patience:
            return _missing(topic, missing, now - those.since, now)
    busy = [member for member in running if member.standing.doing != "idle"]
    ahead = max((member.standing.begun for member in busy), default=0)
    left = [each for each in members.values() if each.ended and each.standing.begun < ahead]
    if left:
        return _ended_early(left, ahead, now)
    patience = max((member.standing.allowed_seconds for member in busy), default=0.0)
    stuck = [member for member in busy if member.standing.seconds > patience]
    if stuck:
        return _stalled(list(members.values()), stuck, patience, now)
    return None


def _missing(topic: str, missing: Sequence[Member], seconds: float, now: float) -> Verdict:
    they = "; ".join(f"{member}, which {_state(member, now)}" for member in missing)
    return Verdict(
        f"the others have waited {seconds:.0f} s for {topic} from {they}",
        [member.process for member in missing],
        stacks=True,
    )


def _ended_early(left: Sequence[Member], ahead: int, now: float) -> Verdict:
    they = "; ".join(f"{member}, which {_state(member, now)}" for member in left)
    return Verdict(
        f"the others, at step {ahead}, wait for {they}: all must take the same number of steps",
        [member.process for member in left],
        stacks=True,
    )


def _stalled(
    members: Sequence[Member], stuck: Sequence[Member], patience: float, now: float
) -> Verdict:
    """Blame the processes that have begun the fewest steps; among equals, those in a callback."""
    fewest = min(member.standing.begun for member in members)
    behind = [member for member in members if member.standing.begun == fewest]
    if len(behind) > 1:
        behind = [m for m in behind if m.standing.doing == "in a callback"] or behind
    seconds = max(member.standing.seconds for member in stuck)
    rest = f"no step for {seconds:.0f} s (timeout {patience:.0f} s)"
    if len(behind) == len(members):
        return Verdict(f"{rest}; all processes are at step {fewest}", [], stacks=True)
    they = "; ".join(f"{member}, which {_state(member, now)}" for member in behind)
    farthest = max(member.standing.begun for member in members)
    return Verdict(
        f"{rest}: the others, at step {farthest}, wait for {they}",
        [member.process for member in behind],
        stacks=True,
    )


def _state(member: Member, now: float) -> str:
    if member.ended:
        return f"ended after step {member.standing.begun}"
    unheard = now - member.heard_at
    if unheard > _UNHEARD_SECONDS:
        return f"sent no heartbeat for {unheard:.0f} s: frozen, or network failure"
    return str(member.standing)
