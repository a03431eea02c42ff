"""Trials of runs of one process or several: each is disturbed, and restarted until it is done."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.checks import is_equal
from chaos.harness import Harness
from chaos.results import RunOutcome
from chaos.runs.checks import check_done
from chaos.runs.defences import DEFENCES
from chaos.runs.faults import FAULTS, Fault
from chaos.runs.references import References
from chaos.runs.trial import Trial


class RunsHarness(Harness):
    """Runs trials of `processes` processes; None for those of the fault."""

    faults = FAULTS

    def __init__(self, *, processes: int | None = None) -> None:
        super().__init__(threads=2)
        self._processes = processes
        self._references = References(self.server, self.folder / "undisturbed")

    @contextlib.contextmanager
    def trial(
        self, folder: Path, fault: str, seed: int, attempt: int, without: str | None
    ) -> Iterator[Trial]:
        kind, chance = FAULTS[fault], random.Random(f"processes of {fault} {seed}")
        processes = self._processes or chance.choice(kind.processes)
        if without:
            processes = DEFENCES[without].processes or processes
        processes = max(processes, min(kind.processes))
        env = {**kind.env, **self._references.env, "CHAOS_WITHOUT": without or ""}
        trial = Trial(self.server, folder, fault, seed, processes, kind.data, env)
        trial.chance.seed(f"{fault} {seed} {attempt}")
        trial.reference = self._references.find(processes, kind.data)
        yield trial

    def disturb(self, trial: Trial, fault: Fault) -> None:
        fault.inject(trial)
        check_done(trial)

    def outcome(self, trial: Trial, **told: Any) -> RunOutcome:
        return RunOutcome(
            **told,
            processes=trial.processes,
            missed=trial.missed,
            equal=is_equal(trial, trial.reference),
            starts=len(trial.starts),
            lost=trial.lost,
            recovery_seconds=trial.recovery_seconds,
        )
