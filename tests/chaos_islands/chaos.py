"""Disturb runs of several islands with every kind of fault, and check that nobody can tell.

    python tests/chaos_islands/chaos.py --faults kill,freeze --trials 40 --seed 7
    python tests/chaos_islands/chaos.py --trials 1000 --json benchmarks/results/islands_faults.json

Trial i has the seed SEED + i, which determines its fault's details: `--faults F --seed S --trials
1` repeats one. Only times differ.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chaos.disk import Disk, can_mount, mounted
from chaos_islands.checks import (
    check_done,
    comparable,
    is_equal,
    join_pauses,
    read_checkpoint,
    read_records,
    recovery_seconds,
    usual_step_seconds,
)
from chaos_islands.faults import FAULTS, Fault
from chaos_islands.results import Outcome, add_to_file, table
from chaos_islands.rounds import JOB as ROUND_JOB
from chaos_islands.rounds import ROUND_FAULTS, Undisturbed, check_rounds, chosen_rounds
from chaos_islands.sizes import MICRO_SHARDS, STEPS
from chaos_islands.trial import JOB, SAVED, Reference, Trial
from support.fork_server import ForkServer

TESTS = Path(__file__).resolve().parents[1]
_STEP_SECONDS = 0.02
_MOST_ATTEMPTS = 4


class Harness:
    """Runs trials, several at a time, and keeps only the folders of failed ones.

    Args:
        results: a file to which each outcome is added.
        rounds: whether islands take several steps between two exchanges.
        programs: a folder of compiled programs, which are then taken on trust; by default they are
            compiled anew, and only undisturbed runs write them.
    """

    def __init__(
        self, results: Path | None = None, programs: Path | None = None, *, rounds: bool = False
    ) -> None:
        self._results, self.rounds = results, rounds
        self._undisturbed_rounds = Undisturbed()
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="replicax-islands-", dir=base))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("REPLICAX_", "XLA_", "JAX_", "CHAOS_"))
        }
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        self._env = {
            **kept,
            "JAX_PLATFORMS": "cpu",
            "NPROC": str(MICRO_SHARDS),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        self._cache = {"CHAOS_CACHE": str(programs or self.folder / "compiled")}
        self._server = ForkServer(self._env)
        self._failed = False
        self.reference: Reference | None = None
        if programs is not None or rounds:
            self._cache |= {"CHAOS_COMPILES": "1"}
        if rounds:
            return
        if programs is not None:
            self.reference = self._alone(self.folder / "undisturbed", self._cache)
        else:
            self.reference = self._undisturbed()
            self._compile()

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()
        if self._failed:
            print(f"the folders of failed trials are in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _undisturbed(self) -> Reference:
        """Return the run of one process that is no island; its programs serve all trials."""
        compiling = {**self._cache, "CHAOS_COMPILES": "1"}
        first, again = (
            self._alone(self.folder / name, env)
            for name, env in (("first", compiling), ("again", self._cache))
        )
        if first.result != again.result or comparable(first.records) != comparable(again.records):
            raise RuntimeError("two undisturbed runs differ")
        return again

    def _compile(self) -> None:
        """Compile the programs of islands, and what a resumed run needs."""
        for name in ("islands", "islands-again"):
            env = {**self._cache, "CHAOS_COMPILES": "1"}
            trial = Trial(self._server, self.folder / name, name, 0, 2, env, linked=False)
            trial.begin()
            if name == "islands-again" and trial.reach(STEPS // 2):
                for start in trial.starts:
                    start.kill()
            trial.finish()
            trial.close()
            assert self.reference is not None
            check_done(trial, self.reference, {0})
            if trial.wrong:
                raise RuntimeError(f"{name}: {trial.wrong}")

    def _alone(self, folder: Path, env: dict[str, str]) -> Reference:
        folder.mkdir()
        child = self._server.fork([str(JOB), str(folder)], env, folder / "out", folder / "err")
        self._server.wait([child], 300.0)
        if child.status != 0:
            raise RuntimeError(f"an undisturbed run: {child.status}, {child.err.read_text()}")
        (result,) = (folder / "notes").glob("*.result")
        run = folder / "run"
        return Reference(json.loads(result.read_text()), read_records(run), read_checkpoint(run))

    def run(self, faults: Sequence[str], trials: int, seed: int, jobs: int = 1) -> list[Outcome]:
        """Run trials of these kinds of fault, which take turns."""
        outcomes = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as executor:
            todo = [
                executor.submit(self._one, faults[number % len(faults)], number)
                for number in range(seed, seed + trials)
            ]
            try:
                for done in concurrent.futures.as_completed(todo):
                    outcome = done.result()
                    outcomes.append(outcome)
                    self._failed |= bool(outcome.wrong)
                    print(outcome.line(), flush=True)
                    if self._results is not None:
                        add_to_file(self._results, outcome, _environment())
            finally:
                executor.shutdown(cancel_futures=True)
        return outcomes

    def _one(self, fault: str, seed: int) -> Outcome:
        """Run one trial, again if its fault came too late."""
        for attempt in range(_MOST_ATTEMPTS):
            outcome = self._try(fault, seed, attempt)
            if outcome.wrong or not outcome.missed:
                break
        return outcome

    def _try(self, name: str, seed: int, attempt: int) -> Outcome:
        fault, began = ROUND_FAULTS[name] if self.rounds else FAULTS[name], time.monotonic()
        islands = random.Random(f"islands of {name} {seed}").choice(fault.islands)
        folder = self.folder / f"{name}-{seed}-{attempt}"
        env = {
            **self._cache,
            "CHAOS_STEP_SECONDS": str(_STEP_SECONDS),
            "REPLICAX_STALL_SECONDS": "8",
            **fault.env,
            **({"CHAOS_ROUNDS": chosen_rounds(name, seed)} if self.rounds else {}),
        }
        with _disk(fault, folder) as disk:
            trial = Trial(
                *(self._server, folder, name, seed, islands, env),
                linked=fault.linked,
                disk=disk,
                job=ROUND_JOB if self.rounds else JOB,
            )
            if attempt:
                trial.chance.seed(f"{name} {seed} {attempt}")
            try:
                if fault.launched:
                    trial.launch(fault.launched)
                else:
                    trial.begin()
                fault.inject(trial)
                trial.finish()
                if not trial.hung:
                    codes = {0} if fault.quiet else {0, SAVED, *fault.codes}
                    self._check(trial, fault, codes)
            except Exception as error:  # what a broken run leaves may be unreadable
                trial.wrong.append(f"{type(error).__name__}: {error}")
            finally:
                trial.close()
            outcome = Outcome(
                fault=name,
                seed=seed,
                islands=islands,
                how="; ".join(trial.told),
                missed=trial.missed or not trial.struck,
                equal=self._is_equal(trial),
                hung=trial.hung,
                starts=len(trial.starts) or len({name for _, _, name in trial.steps()}),
                left=sum(start.child.status == SAVED for start in trial.starts),
                seconds=time.monotonic() - began,
                usual_step_seconds=usual_step_seconds(trial),
                recovery_seconds=recovery_seconds(trial),
                join_seconds=join_pauses(trial),
                wrong=trial.wrong,
                rounds=self.rounds,
            )
            if outcome.wrong and disk is not None:
                shutil.copytree(folder / "run", folder / "kept")
        if not outcome.wrong:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _check(self, trial: Trial, fault: Fault, codes: set[int]) -> None:
        if self.reference is not None:
            check_done(trial, self.reference, codes)
            return

        def again(name: str) -> Trial:
            env, folder = trial.env, self.folder / name
            return Trial(
                *(self._server, folder, name, 0, trial.islands, env), linked=False, job=ROUND_JOB
            )

        equal = fault.quiet or fault.resumes
        undisturbed = self._undisturbed_rounds.of(trial, again) if equal else None
        check_rounds(trial, undisturbed, codes)

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


def _environment() -> dict[str, object]:
    import timing

    return timing.environment()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="chaos.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="faults:\n" + "\n".join(f"  {name:16}{f.what}" for name, f in ROUND_FAULTS.items()),
    )
    parser.add_argument("--rounds", action="store_true", help="several steps between exchanges")
    parser.add_argument("--faults", help="kinds, by commas; all")
    parser.add_argument("--trials", type=int, help="twice the number of kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the outcomes to it")
    options = parser.parse_args(arguments)
    known = ROUND_FAULTS if options.rounds else FAULTS
    faults = options.faults.split(",") if options.faults else [*known]
    for name in set(faults) - set(known):
        parser.error(f"no fault {name!r}; there are {', '.join(known)}")
    trials = 2 * len(faults) if options.trials is None else options.trials
    began = time.monotonic()
    with Harness(options.json, rounds=options.rounds) as harness:
        outcomes = harness.run(faults, trials, options.seed, options.jobs)
    seconds = time.monotonic() - began
    print("\n".join(table(outcomes)))
    failed = sum(bool(outcome.wrong) for outcome in outcomes)
    equal = sum(outcome.equal for outcome in outcomes)
    whose = "each other" if options.rounds else "the undisturbed run"
    print(
        f"{len(outcomes)} trials, {failed} failed, {equal} with the bits of {whose}; "
        f"{seconds:.0f} s, {seconds / len(outcomes):.1f} s a trial"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
