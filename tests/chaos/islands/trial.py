"""One disturbed run: starts its islands, starts each again that ends, and knows how far all are."""

import dataclasses
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from chaos import trial
from chaos.disk import Disk
from chaos.islands.links import Links
from chaos.islands.sizes import STEPS
from chaos.trial import STEP
from support.fork_server import Child, ForkServer

from replicax.launch.process import free_port

JOB = Path(__file__).resolve().parent / "job.py"
MOST_SECONDS = 120.0
"""Time from the last disturbance to the end, after which a run hangs."""
REST_SECONDS = 15.0
"""Time from the first island that is done to the end of all others."""
_TURN_SECONDS = 0.01


@dataclasses.dataclass
class Reference(trial.Reference):
    """The run of one process that is no island."""

    checkpoint: dict[str, str]
    """SHA-256 of each file of the state that was saved last."""


@dataclasses.dataclass
class Start:
    """One start of an island."""

    island: int
    child: Child
    killed: bool = False
    """Whether the trial ended it."""
    terminated: bool = False
    """Whether the trial asked it to end."""

    @property
    def lives(self) -> bool:
        return self.child.status is None

    def kill(self) -> None:
        self.killed = True
        self.child.signal(signal.SIGKILL)

    def stop(self) -> None:
        self.child.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.child.signal(signal.SIGCONT)


class Trial(trial.Trial):
    """A run of several islands.

    A thread starts each island again that ended, 0.1 to 1 s later, as the launcher would, until one
    is done.
    """

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        fault: str,
        seed: int,
        islands: int,
        env: Mapping[str, str],
        *,
        linked: bool = False,
        disk: Disk | None = None,
        job: Path = JOB,
    ) -> None:
        super().__init__(server, folder, fault, seed, env)
        self.islands, self.disk, self.job = islands, disk, job
        self.first_islands = islands
        """Islands at the beginning."""
        self.hung = False
        self.struck: list[float] = []
        """Times of faults, on the clock of the notes."""
        self.starts: list[Start] = []
        self.done_at: float | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._waits = random.Random(f"waits of {fault} {seed}")
        self._held: set[int] = set()
        self._due: dict[int, float] = {}
        self._closing = False
        ports: set[int] = set()
        while len(ports) < islands:
            ports.add(free_port())
        self.ports = list(ports)
        self.links = Links(self.ports) if linked else None
        self._lock = threading.RLock()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    # Islands.

    def begin(self) -> None:
        """Start all islands, and from now on each that ends."""
        with self._lock:
            for island in range(self.islands):
                self._start(island)
        self._keeper.start()

    def of(self, island: int) -> Start:
        """Return the newest start of an island."""
        with self._lock:
            return next(s for s in reversed(self.starts) if s.island == island)

    def living(self) -> list[int]:
        return [island for island in range(self.islands) if self.of(island).lives]

    def hold(self, islands: Iterable[int]) -> None:
        """Start these islands no more, until `free`."""
        with self._lock:
            self._held |= set(islands)

    def free(self) -> None:
        with self._lock:
            self._held.clear()

    def resize(self, islands: int) -> None:
        """Start the run again with another number of islands; all must have ended, and be held."""
        with self._lock:
            self.ports = [*self.ports, *(free_port() for _ in range(islands))][:islands]
            self.islands = islands
            for island in range(islands):
                self._start(island)
            self._held.clear()

    def environment(self, island: int) -> dict[str, str]:
        ports = self.ports if self.links is None else self.links.ports_of(island)
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        place = {"REPLICAX_ISLAND": str(island), "REPLICAX_ISLANDS": addresses}
        return {**self.env, **place, "REPLICAX_SECRET": "s", "REPLICAX_JOB_ID": self.folder.name}

    def _start(self, island: int) -> None:
        child = self.fork(f"{len(self.starts)}-{island}", self.environment(island))
        self.starts.append(Start(island, child))

    def _keep(self) -> None:
        while not self._closing:
            with self._lock:
                now = time.monotonic()
                for island in range(self.islands):
                    start = self.of(island)
                    if start.lives:
                        continue
                    if start.child.status == 0 and self.done_at is None:
                        self.done_at = now
                    if self.done_at is not None or island in self._held:
                        continue
                    wait = self._waits.uniform(0.1, 1.0)
                    if now >= self._due.setdefault(island, now + wait):
                        del self._due[island]
                        self._start(island)
            time.sleep(_TURN_SECONDS)

    # Under `replicax launch`.

    def launch(self, processes: int) -> None:
        """Let `replicax launch` start all islands of so many processes, and each that ends."""
        options = "--islands", str(self.islands), "--processes", str(processes)
        launcher = self._launcher = self.launcher(*options)

        def wait() -> None:
            launcher.wait()
            self.done_at = time.monotonic()

        threading.Thread(target=wait, daemon=True).start()

    def pids(self) -> dict[int, int]:
        """Return a process of the newest start of each island that has begun to train."""
        found = sorted(self.notes.glob("*.steps"), key=lambda path: path.stat().st_ctime_ns)
        return {int(path.stem.split("-")[0]): int(path.stem.split("-")[1]) for path in found}

    def _finish_launched(self, launcher: "subprocess.Popen[bytes]") -> None:
        try:
            launcher.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self._hang(f"replicax launch is there {MOST_SECONDS:g} s after the last fault")
            launcher.kill()
        self.check(launcher.wait() == 0, f"the launcher ended with {launcher.returncode}")

    # Progress.

    def steps(self) -> list[tuple[float, int, str]]:
        """Return time, step and start of all steps done so far, in order of time."""
        found = []
        for path in self.notes.glob("*.steps"):
            data = path.read_bytes()
            whole = data[: len(data) // STEP.size * STEP.size]
            found += [(at, step, path.stem) for at, step in STEP.iter_unpack(whole)]
        return sorted(found)

    @property
    def step(self) -> int:
        """The last step that an island has done."""
        return max((self.last_step(path.stem) for path in self.notes.glob("*.steps")), default=0)

    def has_stepped(self, start: Start) -> bool:
        """Whether this start has done a step."""
        return self.last_step(f"{start.island}-{start.child.pid}") > 0

    def until(self, true: Callable[[], Any], seconds: float = MOST_SECONDS) -> bool:
        """Wait until `true`; False if the run is over before, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not true():
            if self.done_at is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.003)
        return self.done_at is None

    def reach(self, step: int, more_seconds: float = 0.0) -> bool:
        """Wait until an island has done `step` steps, and a moment more."""
        if not self.until(lambda: self.step >= step):
            self.missed = not self.struck
            return False
        return self.pause(more_seconds)

    def pause(self, seconds: float) -> bool:
        """Wait; False if the run is over before."""
        self.until(lambda: False, seconds)
        if self.done_at is not None:
            self.missed = not self.struck
        return self.done_at is None

    def any_moment(self) -> bool:
        """Wait for a moment of the run, at times before its first step; False if it is over."""
        if self.chance.random() < 0.1:
            return self.pause(self.chance.uniform(0.0, 1.5))
        return self.a_step()

    def a_step(self, first: int = 1, last: int = STEPS - 8) -> bool:
        """Wait for any moment of the training."""
        return self.reach(self.chance.randrange(first, last + 1), self.chance.uniform(0, 0.04))

    def strike(self, what: str) -> None:
        """Note that a fault begins now."""
        self.struck.append(time.time())
        self.say(f"{what} at step {self.step}")

    # The end.

    def finish(self) -> None:
        """Wait for the end of all islands."""
        if self._launcher is not None:
            self._finish_launched(self._launcher)
            return
        self.free()
        began = time.monotonic()
        while time.monotonic() - began < MOST_SECONDS and self.done_at is None:
            time.sleep(_TURN_SECONDS)
        self._closing = True
        self._keeper.join()
        if self.done_at is None:
            self._hang(f"not done {MOST_SECONDS:g} s after the last fault, at step {self.step}")
            return
        while any(start.lives for start in self.starts):
            if time.monotonic() - self.done_at > REST_SECONDS:
                break
            time.sleep(_TURN_SECONDS)
            waited = time.monotonic() - self.done_at
            for start in self.starts:  # as the launcher does: it cannot join any more
                if start.lives and not self.has_stepped(start) and waited > 2.0:
                    start.killed = True
                    start.child.signal(signal.SIGTERM)
        if any(start.lives for start in self.starts):
            self._hang(f"not all ended {REST_SECONDS:g} s after one was done")

    def _hang(self, why: str) -> None:
        self.hung = True
        self.wrong.append(why)
        living = [start for start in self.starts if start.lives]
        for start in living:
            start.child.signal(signal.SIGUSR1)  # writes the stacks of its threads
        time.sleep(1.0)
        for start in living:  # the folder may not outlive the machine
            print(start.child.err.read_text()[-6_000:])

    def close(self) -> None:
        """Kill what is left."""
        self._closing = True
        if self._keeper.ident is not None:
            self._keeper.join()
        if self._launcher is not None:
            self._launcher.kill()
        left = [start.child for start in self.starts if start.lives]
        for child in left:
            child.signal(signal.SIGKILL)
        self.server.wait(left, 10.0)
        if self.links is not None:
            self.links.close()

    def pick(self, count: int, among: Collection[int] | None = None) -> list[int]:
        """Draw islands; every second time the writing one is among them."""
        islands = list(range(self.islands) if among is None else among)
        chosen = self.chance.sample(islands, min(count, len(islands)))
        writer = self.writer()
        if writer in islands and writer not in chosen and self.chance.random() < 0.4:
            chosen[0] = writer
        return sorted(chosen)

    def writer(self) -> int:
        """Return the island that writes the folder now, or -1: it has done the first step here.

        That is the one whose present start has done steps for the longest time.
        """
        first: dict[int, float] = {}
        for at, _, name in self.steps():
            island, pid = map(int, name.split("-"))
            if self.of(island).child.pid == pid and self.of(island).lives:
                first.setdefault(island, at)
        # Those that began together have done the first step at about the same time.
        if not first:
            return -1
        least = min(first.values())
        return min(island for island, at in first.items() if at < least + 0.1)
