"""Checks of a finished trial, and what it measured."""

import hashlib
import itertools
import json
import signal
import statistics
from collections.abc import Collection
from pathlib import Path

from chaos.checks import Records, check_nothing_left, check_records, check_results, check_steps
from chaos.islands.sizes import EPOCHS, STEPS
from chaos.islands.trial import Reference, Trial
from chaos.trial import SAVED, records_of
from support.saved_checkpoint import chunks


def check_done(trial: Trial, reference: Reference, codes: Collection[int]) -> None:
    """Check all that must hold at the end, whatever the fault was.

    Islands that the trial did not end itself may have these exit codes.
    """
    check_ends(trial, codes)
    check_results(trial, reference, EPOCHS)
    check_records(trial, of_training(records_of(trial.run)), reference.records)
    trial.check(
        read_checkpoint(trial.run) == reference.checkpoint,
        "the newest checkpoint is not that of the undisturbed run",
    )


def check_ends(trial: Trial, codes: Collection[int]) -> None:
    """Check exit codes, recorded steps and what is left in the folder."""
    for number, start in enumerate(trial.starts):
        code, allowed = start.child.status, set(codes)
        if start.killed:
            allowed |= {SAVED, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}
        if start.terminated:
            allowed |= {-signal.SIGTERM, 128 + signal.SIGTERM}
        trial.check(code in allowed, f"start {number}, of island {start.island}, ended with {code}")
    results = trial.results()
    for start in trial.starts:
        done = f"{start.island}-{start.child.pid}" in results
        trial.check(done or start.child.status, f"island {start.island} ended with 0 too early")
    train = [record["step"] for record in records_of(trial.run) if record["kind"] == "train"]
    check_steps(trial, train, STEPS)
    check_nothing_left(trial)


def of_training(records: Records) -> Records:
    """Return all records but those of who was there."""
    return [record for record in records if record["kind"] != "islands"]


def read_checkpoint(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each chunk of the newest state, and check the sums in its manifest."""
    newest = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    manifest = json.loads((newest / "manifest.json").read_text())
    paths = [path for path in newest.rglob("*") if path.is_file()]
    found = {
        path.relative_to(newest).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.name != "manifest.json"
    }
    told = {name: file["sha256"][0] for name, file in manifest["files"].items()}
    if told != found:
        raise AssertionError(f"{newest} does not have the files of its manifest")
    store = chunks(newest)
    keys = store.list().result()
    values = {key.decode(): store.read(key).result().value for key in keys}
    sums = {key: hashlib.sha256(value).hexdigest() for key, value in values.items()}
    return {"step": manifest["position"]["step"], **sums}


def usual_step_seconds(trial: Trial) -> float | None:
    """Return the median time between two steps before the first fault."""
    first = min(trial.struck, default=float("inf"))
    done = _first_times(trial)
    times = [at for at in done.values() if at < first]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else None


def _first_times(trial: Trial) -> dict[int, float]:
    """Return when each step was first done, in order of steps."""
    done: dict[int, float] = {}
    for at, step, _ in trial.steps():
        done.setdefault(step, at)
    return dict(sorted(done.items()))


def recovery_seconds(trial: Trial) -> list[float]:
    """Return the time from each fault during training to the next step that nobody had done."""
    found, done = [], _first_times(trial)
    for struck in trial.struck:
        before = [step for step, at in done.items() if at <= struck]
        after = [at for step, at in done.items() if at > struck and step > max(before, default=0)]
        if before and after:
            found.append(min(after) - struck)
    return found


def join_pauses(trial: Trial) -> list[float]:
    """Return the time between the steps before and after which an island joined a running one."""
    found, done = [], _first_times(trial)
    firsts: dict[str, tuple[float, int]] = {}
    for at, step, name in trial.steps():
        firsts.setdefault(name, (at, step))
    steps = trial.steps()
    for name, (_, step) in firsts.items():
        both = {n for _, s, n in steps if s == step} & {n for _, s, n in steps if s == step - 1}
        if both - {name}:
            found.append(done[step] - done[step - 1])
    return found
