"""One trial: start a run, disturb it, and restart it until it is done."""

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos import trial
from chaos.runs.sizes import SAVE_EVERY, STEPS
from support.fork_server import Child, ForkServer

from replicax.launch.process import free_port

MOST_STARTS = 10
RUN_SECONDS = 90.0
"""Seconds after which a start counts as hung."""
PEERS_SECONDS = 10.0
"""Seconds in which the other processes must end once one is gone."""
STEPS_IN_FLIGHT = 4
_GLOO = "gloo::EnforceNotMet"


@dataclasses.dataclass(frozen=True)
class Disk:
    """State of a run's folder at some moment."""

    recorded: int
    """The last step with a record."""
    newest: int
    """The step of the newest complete checkpoint, or 0."""
    saving: bool
    """Whether a checkpoint was being written."""


@dataclasses.dataclass
class Start:
    """One start of the run's processes."""

    children: list[Child]
    before: Disk
    killed: set[int] = dataclasses.field(default_factory=set)
    """Pids of the processes that the trial has killed."""

    @property
    def began(self) -> float:
        return self.children[0].started_at

    @property
    def codes(self) -> list[int | None]:
        return [child.status for child in self.children]


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to strike: seconds after the start, or after a step has begun."""

    seconds: float
    step: int | None = None


@dataclasses.dataclass
class Reference(trial.Reference):
    """The undisturbed run on the same number of processes and the same data."""

    seconds: float
    """Seconds of the whole start."""
    first_step_seconds: float
    """Seconds until its first step is done."""


class Trial(trial.Trial):
    """A run of several processes, or of one."""

    job = Path(__file__).with_name("job.py")

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        fault: str,
        seed: int,
        processes: int,
        data: str,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(server, folder, fault, seed, env)
        self.processes, self.data = processes, data
        self.starts: list[Start] = []
        self.lost: list[int] = []
        self.recovery_seconds: list[float] = []
        self.struck_at: float | None = None
        self.reference: Reference

    def disk(self) -> Disk:
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        newest = max((int(name) for name in names if name.isdigit()), default=0)
        recorded = max((record["step"] for record in self.records() if _is_step(record)), default=0)
        return Disk(recorded, newest, any(name.startswith(".saving-") for name in names))

    def records(self) -> list[dict[str, Any]]:
        """Return the records in complete lines: a killed process may leave half of one."""
        path, found = self.run / "records.jsonl", []
        if path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def start(self, **env: str) -> Start:
        """Start all processes, with `env` added to the trial's environment."""
        number = len(self.starts)
        before = self.disk()
        shared = {
            "REPLICAX_PROCESSES": str(self.processes),
            "REPLICAX_COORDINATOR": f"127.0.0.1:{free_port()}",
            "REPLICAX_JOB_ID": f"{self.fault}-{self.seed}-{number}",
            **self.env,
            **env,
        }
        children = [
            self.fork(
                f"start-{number}-process-{process}",
                {**shared, "REPLICAX_PROCESS_ID": str(process)},
                self.data,
            )
            for process in range(self.processes)
        ]
        self.starts.append(Start(children, before))
        return self.starts[-1]

    def note(self, child: Child, event: str) -> dict[str, Any] | None:
        """Return the note of `child` about `event`, or None."""
        with contextlib.suppress(FileNotFoundError):
            told: dict[str, Any] = json.loads((self.notes / f"{child.pid}.{event}").read_text())
            return told
        return None

    def has_noted(self, child: Child, event: str) -> bool:
        """Whether `child` has come to `event`."""
        return self.note(child, event) is not None

    def step(self, child: Child) -> int:
        """Return the step that `child` has begun."""
        return self.last_step(str(child.pid))

    def any_moment(self) -> Moment:
        """Draw a moment of the run: in 2 of 5 cases by the clock, else within a step."""
        if self.chance.random() < 0.4:
            return Moment(self.chance.uniform(0, self.reference.seconds))
        return Moment(self.chance.uniform(0, 0.03), self.chance.randrange(1, STEPS + 1))

    def moment_in_training(self, first: int = 1) -> Moment:
        """Draw a step not before `first`."""
        return Moment(self.chance.uniform(0, 0.03), self.chance.randrange(first, STEPS + 1))

    def wait_for(self, start: Start, moment: Moment) -> bool:
        """Wait for `moment` of `start`; returns whether all its processes still run then."""
        delay = moment.seconds
        if moment.step is None:
            delay -= time.time() - start.began
        elif not self.until(
            start, lambda: any(self.step(c) >= (moment.step or 0) for c in start.children)
        ):
            return False
        return not self.server.wait_any(start.children, max(delay, 0.0))

    def until(self, start: Start, true: Callable[[], object]) -> bool:
        """Wait until `true()` holds; False if a process of `start` ends first."""
        deadline = time.monotonic() + RUN_SECONDS
        while not true():
            if self.server.wait_any(start.children, 0.002) or time.monotonic() > deadline:
                return bool(true())
        return True

    def victims(self, start: Start) -> list[Child]:
        """Draw one process or, in 1 of 3 cases, all."""
        if self.chance.random() < 1 / 3:
            return list(start.children)
        return [self.chance.choice(start.children)]

    def kill(self, start: Start, victims: Sequence[Child]) -> None:
        """Kill processes with SIGKILL, and wait for the others."""
        self.struck_at = time.time()
        for child in victims:
            start.killed.add(child.pid)
            child.signal(signal.SIGKILL)
        self.settle(start)

    def settle(self, start: Start) -> None:
        """Wait until the other processes end by themselves, with a cause."""
        if not all(self.has_noted(child, "joined") for child in start.children):
            self.kill_rest(start)  # as a launcher would; they cannot know
        if not self.server.wait(start.children, PEERS_SECONDS):
            left = sum(child.status is None for child in start.children)
            self.wrong.append(f"{left} processes not gone {PEERS_SECONDS:g} s after the first")
            self.kill_rest(start)
        self.judge(start)

    def kill_rest(self, start: Start) -> None:
        for child in start.children:
            if child.status is None:
                start.killed.add(child.pid)
                child.signal(signal.SIGKILL)
        self.server.wait(start.children, PEERS_SECONDS)

    def judge(self, start: Start, well: Sequence[int] = (0,)) -> None:
        """Check that each process that was not killed succeeded, or failed in one line."""
        for number, child in enumerate(start.children):
            if child.pid in start.killed or child.status in well:
                continue
            if child.status == -signal.SIGABRT and start.killed and _GLOO in self.stderr(child):
                continue  # the network code of jaxlib aborts when a peer is gone
            who = f"start {self.starts.index(start)}: process {number}"
            self.check((child.status or 0) > 0, f"{who} ended with {child.status}")
            self.check(self.cause(child), f"{who} ended with {child.status} and no cause")

    def cause(self, child: Child) -> str:
        """Return the last line of stderr that gives the cause of the end of `child`."""
        lines = self.stderr(child).splitlines()
        return next((line for line in reversed(lines) if line.startswith("replicax: ")), "")

    def stderr(self, child: Child) -> str:
        return child.err.read_text(errors="replace")

    def said(self, start: Start) -> str:
        """Return all output of the processes of `start`."""
        files = [path for child in start.children for path in (child.out, child.err)]
        return "\n".join(path.read_text(errors="replace") for path in files)

    def restored(self, start: Start) -> int | None:
        """Return the step that `start` continued from; None if it took no step."""
        told = self.note(start.children[0], "restored")
        return None if told is None else int(told["step"])

    def measure(self, start: Start, newest: int | None = None) -> None:
        """Note the steps lost before `start`, and the time until its first step was done.

        Args:
            start: one after a fault.
            newest: the step it should go on from; by default that of the newest checkpoint.
        """
        before, restored = start.before, self.restored(start)
        if restored is not None:
            wanted = before.newest if newest is None else newest
            self.check(restored == wanted, f"restored step {restored}, not {wanted}")
            lost = max(before.recorded - restored, 0)
            self.lost.append(lost)
            # The start before may have removed an unfinished checkpoint and then been killed.
            since = self.starts[max(self.starts.index(start) - 1, 0) :]
            saving = any(each.before.saving for each in since)
            most = SAVE_EVERY * (1 + saving) + STEPS_IN_FLIGHT
            self.check(newest is not None or lost <= most, f"{lost} steps lost, more than {most}")
        if self.struck_at is not None:
            told = self.note(start.children[0], "stepped")
            at = told["time"] if told else start.children[0].ended_at
            self.recovery_seconds.append(at - self.struck_at)
            self.struck_at = None

    def finish(self, newest: int | None = None, **env: str) -> None:
        """Restart until the run is done, and measure the recovery of the first restart."""
        while len(self.starts) < MOST_STARTS:
            start = self.start(**env)
            if not self.server.wait_any(start.children, RUN_SECONDS):
                self.wrong.append(f"a start hangs: no process ended in {RUN_SECONDS:g} s")
                self.kill_rest(start)
            self.settle(start)
            self.measure(start, newest)
            newest = None
            if start.codes == [0] * self.processes:
                return
            said = next(filter(None, map(self.cause, start.children)), "")
            self.wrong.append(f"an undisturbed start ended with {start.codes}: {said}")
        self.wrong.append(f"not done after {MOST_STARTS} starts")

    def close(self) -> None:
        """Kill every process that still runs."""
        for start in self.starts:
            self.kill_rest(start)


def _is_step(record: Mapping[str, Any]) -> bool:
    return record.get("kind") in ("train", "skip")
