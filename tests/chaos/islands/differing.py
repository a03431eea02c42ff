"""Trials in which one island differs from the others: at the start, or when it comes back.

Nobody may train on with it: whoever meets it ends with code 2 and a line that names what differs.
"""

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from chaos.harness import Harness
from chaos.islands.differing_job import DIFFERENCES, LOADERS
from chaos.islands.sizes import MICRO_SHARDS
from chaos.islands.trial import Trial
from chaos.results import IslandsOutcome
from support.fork_server import ForkServer

JOB = Path(__file__).resolve().parent / "differing_job.py"
REFUSED = 2
HANG_SECONDS = 90.0
PLACES = (("exact", 0), ("jit", 0), ("shard_map", 0), ("jit", 4), ("shard_map", 3))
"""Modes, and steps of a round."""
_ONLY = {"processor": PLACES[:1], "micro shards": PLACES[1:]}
"""Where a difference is one: of bits, and without a limit of its own."""


class Differing(Trial):
    """A trial in which an island, `odd`, differs as soon as `differs`."""

    def __init__(
        self, server: ForkServer, folder: Path, name: str, seed: int, env: Mapping[str, str]
    ) -> None:
        draw = random.Random(f"place of {name} {seed}")
        mode, every = draw.choice(_ONLY.get(name, PLACES))
        env = {**env, "CHAOS_MODE": mode, "CHAOS_EVERY": str(every)}
        env["CHAOS_LOADS"] = str(int(name in LOADERS))
        super().__init__(server, folder, name, seed, draw.choice((2, 3)), env, job=JOB)
        self.odd = draw.randrange(self.islands)
        self.differs, self._name = False, name
        self.say(f"{name}, {mode}, {f'every {every} steps' if every else 'every step'}")

    def environment(self, island: int) -> dict[str, str]:
        env = super().environment(island)
        odd = self.differs and island == self.odd
        return {**env, "CHAOS_DIFFERS": self._name} if odd else env


def at_the_start(trial: Differing) -> None:
    """Start all islands, one of which differs."""
    trial.differs = True
    trial.hold(range(trial.islands))
    trial.begin()
    trial.struck.append(time.time())
    _wait(trial, lambda: not trial.living())
    codes = {start.child.status for start in trial.starts}
    trial.check(codes == {REFUSED}, f"the islands ended with {codes}")


def coming_back(trial: Differing) -> None:
    """Kill an island, and let it come back otherwise."""
    trial.hold(i for i in range(trial.islands) if i != trial.odd)
    trial.begin()
    if not trial.reach(trial.chance.randrange(2, 8)):
        return
    trial.differs = True
    trial.strike("kill -9 of one")
    trial.of(trial.odd).kill()
    back = lambda: sum(start.island == trial.odd for start in trial.starts) > 1  # noqa: E731
    _wait(trial, back)
    trial.hold(range(trial.islands))
    _wait(trial, lambda: not trial.living())
    codes = {island: trial.of(island).child.status for island in range(trial.islands)}
    odd, others = codes.pop(trial.odd), set(codes.values())
    over = max(trial.of(island).child.ended_at for island in codes)
    if odd != REFUSED and trial.of(trial.odd).child.ended_at > over:
        trial.missed = True  # it came back once the run was over
        return
    together = trial.fault in LOADERS  # who reads other rows is found once it has joined
    trial.check(odd == REFUSED, f"the island that differs ended with {odd}")
    trial.check(others == {0} or (together and others == {REFUSED}), f"others ended with {others}")


def _wait(trial: Differing, true: Callable[[], Any]) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not true() and not trial.hung:
        if time.monotonic() > until:
            trial._hang(f"islands {trial.living()} still run after {HANG_SECONDS:g} s")
        time.sleep(0.02)


class DifferingHarness(Harness):
    """Runs trials of islands that differ; faults are what one does otherwise."""

    faults = DIFFERENCES
    whose = "each other"

    def __init__(self) -> None:
        super().__init__(MICRO_SHARDS, "/dev/shm" if Path("/dev/shm").is_dir() else None)
        self._cache = {"CHAOS_CACHE": str(self.folder / "compiled"), "CHAOS_COMPILES": "1"}

    @contextlib.contextmanager
    def trial(
        self, folder: Path, fault: str, seed: int, attempt: int, without: str | None
    ) -> Iterator[Differing]:
        env = {**self._cache, "CHAOS_STEP_SECONDS": "0.3", "REPLICAX_STALL_SECONDS": "20"}
        yield Differing(self.server, folder, fault, seed, env)
        shutil.rmtree(folder / "run", ignore_errors=True)

    def disturb(self, trial: Differing, fault: Any) -> None:
        round_of_all = trial.seed // len(self.faults)
        at_the_start(trial) if round_of_all % 2 == 0 else coming_back(trial)
        errors = [child.err.read_text() for child in trial.children]
        raw = [text for text in errors if "Traceback" in text and "\nreplicax.errors." not in text]
        trial.check(not raw, f"{len(raw)} tracebacks, such as {raw[0][-300:] if raw else ''}")

    def outcome(self, trial: Differing, **told: Any) -> IslandsOutcome:
        ends = [result["params"] for result in trial.results().values()]
        return IslandsOutcome(
            **told,
            islands=trial.islands,
            missed=trial.missed,
            equal=len(set(ends)) < 2,
            hung=trial.hung,
            starts=len(trial.starts),
            left=sum(start.child.status == REFUSED for start in trial.starts),
            usual_step_seconds=None,
            recovery_seconds=[],
            join_seconds=[],
        )
