"""Real jobs with a fault in one process, and the rules for the reaction of the others."""

import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from support.cluster_jobs import free_port

SCRIPT = Path(__file__).with_name("faults_job.py")
PATIENCE = {"REPLICAX_STALL_SECONDS": "2", "REPLICAX_SILENT_SECONDS": "3"}
MARKER = "REPLICAX_FAULT_TRIAL"
TRIAL_SECONDS = 120.0
"""Seconds after which a trial has failed and is cleaned up."""
GONE_SECONDS = 5.0


@dataclasses.dataclass
class Trial:
    """One injected fault and its outcome."""

    fault: str
    processes: int
    victim: int
    step: int
    seconds: float = 0.0
    """From the fault until all others have exited."""
    line: str = ""
    """The last line of a survivor."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    """Violated rules."""

    def check(self, right: bool, otherwise: str) -> None:
        if not right:
            self.wrong.append(otherwise)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    what: str
    """Its name in the table."""
    expected: str
    run: Callable[["Run"], None]


class Process:
    """A started process and its stderr."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self._output = output
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
            self.popen = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.ended_at: float | None = None

    def ended(self) -> bool:
        if self.ended_at is None and self.popen.poll() is not None:
            self.ended_at = time.monotonic()
        return self.ended_at is not None

    @property
    def code(self) -> int | None:
        return self.popen.returncode

    def said(self) -> str:
        """The last line of its stdout, to which Gloo also writes."""
        return (self._output.read_text().split() or [""])[-1]

    def last_line(self) -> str:
        lines = self._output.with_suffix(".err").read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Run:
    """A running trial: starts its processes, and leaves none behind."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.folder = trial, folder
        self.port, self.marker = free_port(), uuid.uuid4().hex
        self.started: list[Process] = []

    def environment(self, job: str = "first", **more: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("REPLICAX_", "XLA_", "JAX_"))
        }
        place = {
            "REPLICAX_PROCESSES": str(self.trial.processes),
            "REPLICAX_COORDINATOR": f"127.0.0.1:{self.port}",
            "REPLICAX_JOB_ID": job,
        }
        return {**kept, **PATIENCE, **place, "JAX_PLATFORMS": "cpu", MARKER: self.marker, **more}

    def command(self, fault: str | None = None) -> list[str]:
        trial = self.trial
        words = [fault or trial.fault, trial.victim, trial.step, self.folder]
        return [sys.executable, str(SCRIPT), *map(str, words)]

    def start(
        self, process: int, *, fault: str | None = None, name: str = "", **env: str
    ) -> Process:
        env = {"REPLICAX_PROCESS_ID": str(process), **env}
        output = self.folder / f"{name or 'process'}-{process}.out"
        begun = Process(self.command(fault), self.environment(**env), output)
        self.started.append(begun)
        return begun

    def start_all(self, *, fault: str | None = None, name: str = "", **env: str) -> list[Process]:
        count = self.trial.processes
        return [self.start(process, fault=fault, name=name, **env) for process in range(count)]

    def until(self, true: Callable[[], object], what: str, seconds: float = TRIAL_SECONDS) -> bool:
        deadline = time.monotonic() + seconds
        while not true():
            for process in self.started:
                process.ended()
            if time.monotonic() > deadline:
                self.trial.wrong.append(f"not within {seconds:.0f} s: {what}")
                return False
            time.sleep(0.01)
        return True

    def all_end(self, processes: Sequence[Process]) -> bool:
        return self.until(lambda: all(p.ended() for p in processes), "all exit")

    def injected_at(self) -> float:
        return float((self.folder / "injected").read_text())

    def left(self) -> list[int]:
        """Return the processes of this trial that still run."""
        return find_marked(self.marker)

    def clear(self) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.popen.wait()


def find_marked(marker: str) -> list[int]:
    """Return the living processes with `marker` in their environment."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
                if state not in b"ZX" and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def lost(run: Run, says: str, limit_seconds: float) -> None:
    """A fault in one process at a step; the others exit in time and name it."""
    trial, processes = run.trial, run.start_all()
    others = [p for number, p in enumerate(processes) if number != trial.victim]
    if not run.all_end(others):
        return
    trial.seconds = max(p.ended_at or 0.0 for p in others) - run.injected_at()
    trial.check(
        trial.seconds <= limit_seconds, f"exited after {trial.seconds:.1f} s > {limit_seconds:g} s"
    )
    victim = processes[trial.victim]
    if trial.fault == "freeze":
        victim.popen.send_signal(signal.SIGCONT)
    run.until(victim.ended, "the faulty process exits too", GONE_SECONDS)
    trial.check(victim.code != 0, "the faulty process exited with 0")
    named(trial, others, says)


def named(trial: Trial, processes: Sequence[Process], says: str) -> None:
    """Each of `processes` failed, not by a signal, and its last line matches `says`."""
    pattern = says.replace("VICTIM", str(trial.victim))
    for process in processes:
        line = process.last_line()
        trial.check((process.code or 0) > 0, f"exit code {process.code}")
        trial.check(re.search(pattern, line) is not None, f"last line {line!r}")
        trial.line = trial.line or line


def absent(run: Run) -> None:
    trial, begun = run.trial, time.monotonic()
    others = [run.start(p) for p in range(trial.processes) if p != trial.victim]
    if run.all_end(others):
        trial.seconds = time.monotonic() - begun
        says = r"ClusterError: process VICTIM of \d did not join within 4 s"
        if trial.victim == 0:
            says = r"ClusterError: .* could not reach process VICTIM at .* connection refused"
        named(trial, others, says)
        codes = [process.code for process in others]
        trial.check(set(codes) == {1}, f"exit codes {codes}, each should be 1")


def different(run: Run, says: str) -> None:
    """All stop before the first step and name the field and the process."""
    processes = run.start_all()
    if run.all_end(processes):
        ends = [process.ended_at or 0.0 for process in processes]
        run.trial.seconds = max(ends) - min(ends)
        named(run.trial, processes, says)
        run.trial.check(not list(run.folder.glob("stepped-*")), "a step was taken")


_digests: dict[int, str] = {}
_digesting = threading.Lock()


def undisturbed(run: Run) -> str:
    """The digest of the weights of an undisturbed job."""
    count = run.trial.processes
    with _digesting:
        if count not in _digests:
            with tempfile.TemporaryDirectory() as folder:
                alone = Run(dataclasses.replace(run.trial, wrong=[]), Path(folder))
                try:
                    processes = alone.start_all(fault="none")
                    alone.all_end(processes)
                    _digests[count] = processes[0].said()
                finally:
                    alone.clear()
        return _digests[count]


def intruded(run: Run, intrude: Callable[[Run], None]) -> None:
    """A healthy job pauses while intruders try to join, continues, and ends as if alone."""
    digest = undisturbed(run)
    calm = {"REPLICAX_STALL_SECONDS": "600"}
    processes = run.start_all(fault="intruders", **calm)
    waiting = [run.folder / f"waiting-{number}" for number in range(run.trial.processes)]
    if not run.until(lambda: all(path.exists() for path in waiting), "the job is running"):
        return
    intrude(run)
    run.trial.check(not any(p.ended() for p in processes), "the job was ended")
    (run.folder / "go-on").touch()
    if run.all_end(processes):
        codes, digests = [p.code for p in processes], {p.said() for p in processes}
        run.trial.check(set(codes) == {0}, f"exit codes of the job {codes}")
        run.trial.check(bool(digest) and digests == {digest}, "the final weights differ")


def duplicate(run: Run) -> None:
    trial, begun = run.trial, time.monotonic()
    intruder = run.start(trial.victim, fault="none", name="intruder")
    if run.all_end([intruder]):
        trial.seconds = time.monotonic() - begun
        says = r"rejected by process 0: process VICTIM \(.*\) is already in the job"
        if trial.victim == 0:
            says = (
                r"process 0 cannot listen on .* \(process 0 of this job, of \d processes, already"
            )
        named(trial, [intruder], says)


def second_job(run: Run) -> None:
    begun = time.monotonic()
    second = run.start_all(fault="none", name="second", job="second")
    if run.all_end(second):
        run.trial.seconds = time.monotonic() - begun
        says = "another job uses this port"
        named(run.trial, second, says)


def launcher(run: Run) -> None:
    """`replicax launch` is killed while its processes train; none of them is left."""
    trial = run.trial
    launch = [sys.executable, "-m", "replicax", "launch", "--processes", str(trial.processes)]
    command = [*launch, "--logs", str(run.folder / "logs"), "--", *run.command()]
    env = {MARKER: run.marker, "JAX_PLATFORMS": "cpu"}
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("REPLICAX_", "XLA_", "JAX_"))}
    parent = Process(command, {**clean, **PATIENCE, **env}, run.folder / "launcher.out")
    run.started.append(parent)
    stepped = [run.folder / f"stepped-{number}" for number in range(trial.processes)]
    if not run.until(lambda: parent.ended() or all(path.exists() for path in stepped), "all train"):
        return
    trial.check(not parent.ended(), f"the launcher ended: {parent.last_line()}")
    time.sleep(trial.step / 100)
    trial.check(len(run.left()) > trial.processes, "the scan does not see the processes")
    begun = time.monotonic()
    parent.popen.kill()
    run.until(lambda: not run.left(), "no orphan", GONE_SECONDS)
    trial.seconds = time.monotonic() - begun


_GONE = r"process \d stops: process VICTIM \(.*\) disconnected without notice"
_FROZEN = r"process \d stops: .*process VICTIM \(.*sent no heartbeat for"
_ASLEEP = r"process \d stops: .*(wait for|waited \d+ s for .* from) process VICTIM \(.*has begun"
_LEFT = r"process \d stops: .*(wait for|for .* from) process VICTIM \(.*which ended after step"
_FAILED = r"process \d stops: process VICTIM \(.*\) failed: ValueError: bad value"
_ALL = "all stop before the first step and name the field and the process"

FAULTS = {
    "kill": Fault(
        "`kill -9` of a process",
        "the others exit within 5 s and name it",
        lambda run: lost(run, _GONE, GONE_SECONDS),
    ),
    "freeze": Fault(
        "`SIGSTOP` of a process",
        "the others exit within 6 s and name it; it exits when it wakes up",
        lambda run: lost(run, _FROZEN, 6.0),
    ),
    "sleep": Fault(
        "a process sleeps between two steps",
        "all exit within 6 s and name it",
        lambda run: lost(run, _ASLEEP, 6.0),
    ),
    "callback": Fault(
        "a process sleeps inside a step, in a callback",
        "all exit within 6 s and name it",
        lambda run: lost(run, _ASLEEP + ".*in a callback", 6.0),
    ),
    "leave": Fault(
        "a process leaves its loop early, with exit code 0",
        "all exit within 5 s and name it",
        lambda run: lost(run, _LEFT, GONE_SECONDS),
    ),
    "error": Fault(
        "an exception in one process",
        "the others exit within 5 s and name it and the exception",
        lambda run: lost(run, _FAILED, GONE_SECONDS),
    ),
    "absent": Fault(
        "a process that never joins (timeout 4 s)",
        "the others raise a Python error that names it, without an abort",
        absent,
    ),
    "duplicate": Fault(
        "a second process with the same rank",
        "it is rejected and names the first; the job ends with the same weights as alone",
        lambda run: intruded(run, duplicate),
    ),
    "port": Fault(
        "a second job on the same port",
        "it is rejected; the job ends with the same weights as alone",
        lambda run: intruded(run, second_job),
    ),
    "learning-rate": Fault(
        "a different learning rate on one process",
        _ALL,
        lambda run: different(run, r"on the program.*: line \d+ is .* on process VICTIM\b"),
    ),
    "batch": Fault(
        "a different batch size on one process",
        _ALL,
        lambda run: different(run, r"disagree on the data: batch_size is .* on process VICTIM\b"),
    ),
    "version": Fault(
        "a different version of jax on one process",
        _ALL,
        lambda run: different(run, r"the processes differ: jax is .*0\.0\.1 on process VICTIM\b"),
    ),
    "steps": Fault(
        "a different number of steps on one process",
        _ALL,
        lambda run: different(run, r"disagree on the run: steps is .*\b61 on process VICTIM\b"),
    ),
    "launcher": Fault("`kill -9` of `replicax launch`", "no process is left after 5 s", launcher),
}


def run_trial(fault: str, number: int) -> Trial:
    """The `number`th trial of `fault`: alternately 2 and 3 processes, any of them, at any step."""
    chance = random.Random(f"{fault} {number}")
    processes = 2 + number % 2
    trial = Trial(fault, processes, chance.randrange(processes), chance.randrange(5, 50))
    with tempfile.TemporaryDirectory(prefix="replicax-fault-") as folder:
        run = Run(trial, Path(folder))
        try:
            FAULTS[fault].run(run)
            trial.check(not run.left(), "a process is left")
        except (OSError, ValueError) as error:
            trial.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            run.clear()
    return trial
