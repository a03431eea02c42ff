"""Trials of several islands: each that ends is started again, until one has completed the run."""

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.checks import check_alike, is_equal
from chaos.disk import Disk, can_mount, mounted
from chaos.harness import Harness, Once
from chaos.islands.checks import (
    check_done,
    join_pauses,
    of_training,
    read_checkpoint,
    recovery_seconds,
    usual_step_seconds,
)
from chaos.islands.faults import FAULTS, Fault
from chaos.islands.rounds import JOB as ROUND_JOB
from chaos.islands.rounds import ROUND_FAULTS, check_rounds, chosen_rounds
from chaos.islands.sizes import MICRO_SHARDS, STEPS
from chaos.islands.trial import JOB, Reference, Trial
from chaos.results import IslandsOutcome, add_to_file
from chaos.trial import SAVED, records_of

_STEP_SECONDS = 0.02


class IslandsHarness(Harness):
    """Runs trials of islands.

    Args:
        results: a file to which each outcome is added.
        programs: a folder of compiled programs, which are then taken on trust; by default they are
            compiled anew, and only undisturbed runs write them.
        rounds: whether islands take several steps between two exchanges.
    """

    def __init__(
        self, results: Path | None = None, programs: Path | None = None, *, rounds: bool = False
    ) -> None:
        super().__init__(MICRO_SHARDS, "/dev/shm" if Path("/dev/shm").is_dir() else None)
        self._results, self._rounds = results, rounds
        self.faults = ROUND_FAULTS if rounds else FAULTS
        self.whose = "each other" if rounds else "the undisturbed run"
        self._undisturbed_rounds = Once()
        self._cache = {"CHAOS_CACHE": str(programs or self.folder / "compiled")}
        compiling = {**self._cache, "CHAOS_COMPILES": "1"}
        self.reference: Reference | None = None
        if programs is not None or rounds:
            self._cache = compiling
        if rounds:
            return
        self.reference = self._alone("first", compiling)
        if programs is None:
            check_alike(self.reference, self._alone("again", self._cache))
            self._compile(compiling)

    def _alone(self, name: str, env: dict[str, str]) -> Reference:
        """Return the run of one process that is no island; its programs serve all trials."""
        trial = Trial(self.server, self.folder / name, name, 0, 1, env)
        child = trial.fork("alone", env)
        self.server.wait([child], 300.0)
        if child.status != 0:
            raise RuntimeError(f"an undisturbed run: {child.status}, {child.err.read_text()}")
        (result,) = trial.results().values()
        return Reference(result, of_training(records_of(trial.run)), read_checkpoint(trial.run))

    def _compile(self, env: dict[str, str]) -> None:
        """Compile the programs of islands, and what a resumed run needs."""
        for name in ("islands", "islands-again"):
            trial = Trial(self.server, self.folder / name, name, 0, 2, env)
            trial.begin()
            if name == "islands-again" and trial.reach(STEPS // 2):
                for start in trial.starts:
                    start.kill()
            trial.finish()
            trial.close()
            self._check(trial, FAULTS["kill"], {0})
            if trial.wrong:
                raise RuntimeError(f"{name}: {trial.wrong}")

    @contextlib.contextmanager
    def trial(
        self, folder: Path, fault: str, seed: int, attempt: int, without: str | None
    ) -> Iterator[Trial]:
        assert without is None, "these trials know no defences"
        kind = self.faults[fault]
        islands = random.Random(f"islands of {fault} {seed}").choice(kind.islands)
        usual = {"CHAOS_STEP_SECONDS": str(_STEP_SECONDS), "REPLICAX_STALL_SECONDS": "8"}
        env, job = {**self._cache, **usual, **kind.env}, JOB
        if self._rounds:
            env["CHAOS_ROUNDS"], job = chosen_rounds(fault, seed), ROUND_JOB
        with _disk(kind, folder) as disk:
            trial = Trial(
                *(self.server, folder, fault, seed, islands, env),
                linked=kind.linked,
                disk=disk,
                job=job,
            )
            if attempt:
                trial.chance.seed(f"{fault} {seed} {attempt}")
            yield trial
            if trial.wrong and disk is not None:
                shutil.copytree(trial.run, folder / "kept")

    def disturb(self, trial: Trial, fault: Fault) -> None:
        if fault.launched:
            trial.launch(fault.launched)
        else:
            trial.begin()
        fault.inject(trial)
        trial.finish()
        if not trial.hung:
            self._check(trial, fault, {0} if fault.quiet else {0, SAVED, *fault.codes})

    def outcome(self, trial: Trial, **told: Any) -> IslandsOutcome:
        return IslandsOutcome(
            **told,
            islands=trial.first_islands,
            missed=trial.missed or not trial.struck,
            equal=self._is_equal(trial),
            hung=trial.hung,
            starts=len(trial.starts) or len({name for _, _, name in trial.steps()}),
            left=sum(start.child.status == SAVED for start in trial.starts),
            usual_step_seconds=usual_step_seconds(trial),
            recovery_seconds=recovery_seconds(trial),
            join_seconds=join_pauses(trial),
            rounds=self._rounds,
        )

    def note(self, outcome: IslandsOutcome) -> None:
        if self._results is not None:
            import timing

            add_to_file(self._results, outcome, timing.environment())

    def _check(self, trial: Trial, fault: Fault, codes: set[int]) -> None:
        if self.reference is not None:
            check_done(trial, self.reference, codes)
            return
        undisturbed = None
        if fault.quiet or fault.resumes:
            key = f"{trial.islands}-{trial.env['CHAOS_ROUNDS']}"
            undisturbed = self._undisturbed_rounds.of(key, lambda: self._undisturbed(trial))
        check_rounds(trial, undisturbed, codes)

    def _undisturbed(self, like: Trial) -> dict[str, Any]:
        """Return the result of an undisturbed run with rounds."""
        folder = self.folder / f"undisturbed-{like.fault}-{like.seed}"
        trial = Trial(self.server, folder, folder.name, 0, like.islands, like.env, job=like.job)
        try:
            trial.begin()
            trial.finish()
        finally:
            trial.close()
        check_rounds(trial, None, {0})
        if trial.wrong:
            raise RuntimeError(f"an undisturbed run: {trial.wrong}")
        return next(iter(trial.results().values()))

    def _is_equal(self, trial: Trial) -> bool:
        if self.reference is not None:
            return is_equal(trial, self.reference)
        return len({result["agreed"] for result in trial.results().values()}) == 1


@contextlib.contextmanager
def _disk(fault: Fault, folder: Path) -> Iterator[Disk | None]:
    if fault.disk and can_mount():
        with mounted(folder / "run") as disk:
            yield disk
    else:
        yield None
