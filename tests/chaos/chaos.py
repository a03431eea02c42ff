"""Disturb small training runs with every kind of fault, and check that the result is the same.

    python tests/chaos/chaos.py --fault kill --trials 40 --seed 7
    python tests/chaos/chaos.py --trials 1000 --jobs 3 --json trials.json
    python tests/chaos/chaos.py --without verification

Trial i has the seed SEED + i, which determines all else: `--seed S --trials 1` repeats it,
with the fault that a failed trial's line names. Only times differ.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # otherwise `chaos` would be `chaos.py` in this file's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from chaos.checks import check_done, is_bitwise_equal
from chaos.defences import DEFENCES
from chaos.disk import can_mount
from chaos.faults import FAULTS
from chaos.outcome import Outcome, table
from chaos.references import References
from chaos.trial import Trial
from support.fork_server import ForkServer

TESTS = Path(__file__).resolve().parents[1]
_USUAL_TRIALS = 40
_MOST_ATTEMPTS = 4
_SECONDS_BETWEEN_LINES = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    with Harness(processes=options.processes) as harness:
        began = time.monotonic()
        print(f"chaos {options.trials} trials, {', '.join(options.faults)}, seed {options.seed}")
        outcomes = harness.run(
            options.faults, options.trials, options.seed, options.jobs, options.without
        )
    seconds = time.monotonic() - began
    print("\n".join(table(outcomes)))
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    starts = sum(outcome.starts for outcome in outcomes)
    each = sum(outcome.cpu_seconds for outcome in outcomes) / len(outcomes)
    print(
        f"{len(outcomes)} trials, {len(wrong)} failed, {starts} starts; {seconds:.0f} s, "
        f"{seconds / len(outcomes):.2f} s and {each:.2f} CPU seconds a trial"
    )
    if options.json:
        told = [dataclasses.asdict(outcome) for outcome in outcomes]
        options.json.write_text(json.dumps({"seconds": seconds, "trials": told}, indent=1) + "\n")
    if options.without:
        verdict = "was missed" if wrong else "was NOT missed: no trial needs it"
        print(f"without {options.without}: {verdict}")
        return 0 if wrong else 1
    return 1 if wrong else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="faults:\n" + "\n".join(f"  {name:16}{f.what}" for name, f in FAULTS.items()),
    )
    parser.add_argument("--fault", help="kinds, by commas; all by default")
    parser.add_argument("--trials", type=int, default=_USUAL_TRIALS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="of each run; 1 to 4 by default")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for each trial's outcome")
    parser.add_argument(
        "--without", choices=DEFENCES, help="switch a defence off; then a trial must fail"
    )
    options = parser.parse_args(arguments)
    usual = DEFENCES[options.without].fault if options.without else ",".join(FAULTS)
    options.faults = (options.fault or usual).split(",")
    for name in set(options.faults) - set(FAULTS):
        parser.error(f"no fault {name!r}; there are {', '.join(FAULTS)}")
    if min(options.trials, options.jobs, options.processes or 1) < 1:
        parser.error("--trials, --jobs and --processes count from 1")
    return options


class Harness:
    """Runs trials, several at a time, and keeps only the folders of failed ones."""

    def __init__(self, *, processes: int | None = None) -> None:
        self._processes = processes
        self._folder = Path(tempfile.mkdtemp(prefix="replicax-chaos-"))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("REPLICAX_", "XLA_", "JAX_", "CHAOS_"))
        }
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        self._env = {**kept, "JAX_PLATFORMS": "cpu", "NPROC": "2", "OPENBLAS_NUM_THREADS": "1"}
        self._env["PYTHONPATH"] = path
        self._server = ForkServer(self._env)
        self._references = References(self._server, self._folder / "undisturbed")
        self._failed = False

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()
        if self._failed:
            print(f"the folders of failed trials are in {self._folder}")
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self, faults: Sequence[str], trials: int, seed: int, jobs: int, without: str | None = None
    ) -> list[Outcome]:
        """`trials` of them, the kind of each by its seed.

        Args:
            faults: kinds, which take turns.
            trials: how many.
            seed: of the first; the others count on.
            jobs: trials at a time.
            without: a defence to switch off; it is enough then that one trial fails.
        """
        outcomes: list[Outcome] = []
        told_at = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(jobs) as executor:
            todo = [
                executor.submit(self._one, faults[number % len(faults)], number, without)
                for number in range(seed, seed + trials)
            ]
            try:
                for done in concurrent.futures.as_completed(todo):
                    outcomes.append(done.result())
                    failed = sum(bool(each.wrong) for each in outcomes)
                    if outcomes[-1].wrong:
                        self._failed = True
                        print(outcomes[-1].line(), flush=True)
                        if without:
                            break
                    elif time.monotonic() > told_at + _SECONDS_BETWEEN_LINES:
                        print(f"{len(outcomes)} of {trials} trials, {failed} failed", flush=True)
                        told_at = time.monotonic()
            finally:
                executor.shutdown(cancel_futures=True)
        return outcomes

    def _one(self, fault: str, seed: int, without: str | None) -> Outcome:
        """Run one trial, again if its fault came too late."""
        for attempt in range(_MOST_ATTEMPTS):
            outcome = self._try(fault, seed, attempt, without)
            if outcome.wrong or not outcome.missed:
                break
        return outcome

    def _try(self, name: str, seed: int, attempt: int, without: str | None) -> Outcome:
        fault, began = FAULTS[name], time.monotonic()
        chance = random.Random(f"processes of {name} {seed}")
        processes = self._processes or chance.choice(fault.processes)
        if without:
            processes = DEFENCES[without].processes or processes
        processes = max(processes, min(fault.processes))
        env = {**self._env, **fault.env, **self._references.env, "CHAOS_WITHOUT": without or ""}
        folder = self._folder / f"{name}-{seed}-{attempt}"
        reference = self._references.find(processes, fault.data)
        trial = Trial(self._server, folder, name, seed, processes, fault.data, env)
        trial.chance.seed(f"{name} {seed} {attempt}")
        trial.reference = reference
        try:
            fault.inject(trial)
            check_done(trial)
        except Exception as error:  # one trial's; what a broken run leaves may be unreadable
            trial.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            trial.clear()
        outcome = Outcome(
            fault=name,
            seed=seed,
            processes=processes,
            how=trial.how,
            missed=trial.missed,
            equal=is_bitwise_equal(trial),
            starts=len(trial.starts),
            lost=trial.lost,
            recovery_seconds=trial.recovery_seconds,
            seconds=time.monotonic() - began,
            cpu_seconds=sum(child.cpu_seconds for s in trial.starts for child in s.children),
            wrong=trial.wrong,
        )
        if not outcome.wrong:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome


if __name__ == "__main__":
    if can_mount():
        print("disk-full, read-only: on a real tmpfs; io-error: injected")
    else:
        print("disk-full, read-only, io-error: injected, as nothing can be mounted here")
    sys.exit(main())
