"""Faults of the disk that holds the checkpoints."""

import time
from collections.abc import Callable

from chaos.disk import can_mount, mounted
from chaos.runs.failing_writes import STAGES
from chaos.runs.sizes import SAVE_EVERY
from chaos.runs.trial import RUN_SECONDS, Start, Trial

MOST_FREE_BYTES = 60_000
"""Less than a checkpoint of the trial's job needs."""
_CURED_AFTER_SECONDS = 0.3


def full(trial: Trial) -> None:
    """Fill the disk for a while, or until the run has stopped."""
    if not can_mount():
        _injected(trial, "ENOSPC")
        return
    free = trial.chance.randrange(MOST_FREE_BYTES)
    with mounted(trial.checkpoints) as disk:
        _disturbed(trial, "tmpfs full", lambda: disk.fill(free), disk.empty)


def read_only(trial: Trial) -> None:
    """Make the disk read-only for a while, or until the run has stopped."""
    if not can_mount():
        _injected(trial, "EROFS")
        return
    with mounted(trial.checkpoints) as disk:
        _disturbed(trial, "tmpfs read-only", disk.lock, disk.unlock)


def io_error(trial: Trial) -> None:
    """Let writes fail with EIO."""
    _injected(trial, "EIO")


def _disturbed(
    trial: Trial, what: str, break_it: Callable[[], object], mend: Callable[[], None]
) -> None:
    """Break the disk at some step; repair it soon, or once the run has stopped."""
    start = trial.start()
    if not trial.wait_for(start, trial.moment_in_training()):
        trial.missed = True
        _stopped(trial, start)
        return
    before = trial.disk()
    soon = trial.chance.random() < 0.5
    step = trial.step(start.children[0])
    trial.say(f"{what} from step {step}{' for a moment' * soon}")
    trial.struck_at = time.time()
    break_it()
    if soon:
        trial.server.wait(start.children, trial.chance.uniform(0, _CURED_AFTER_SECONDS))
        mend()
    trial.server.wait_any(start.children, RUN_SECONDS)
    mend()
    after = trial.disk()
    trial.check(after.newest >= before.newest, f"step {before.newest} was saved and is gone")
    _stopped(trial, start)


def _injected(trial: Trial, error: str) -> None:
    """Let some saves fail at one of their stages."""
    saves, stage = trial.chance.choice((1, 1, 2, 2, 3, 99)), trial.chance.choice(list(STAGES))
    trial.say(f"{error} injected into {stage} of {saves} saves")
    start = trial.start(CHAOS_FAIL_WRITES=f"{error}:{saves}:{stage}")
    trial.until(start, lambda: trial.step(start.children[0]) >= SAVE_EVERY)
    trial.struck_at = time.time()
    trial.server.wait_any(start.children, RUN_SECONDS)
    _stopped(trial, start)
    if set(start.codes) == {0}:
        trial.check("save has failed" in trial.said(start), "no alarm was raised")


def _stopped(trial: Trial, start: Start) -> None:
    """Check that the run finished or stopped with its cause, and restart it if it stopped."""
    trial.struck_at = None
    trial.settle(start)
    trial.measure(start)
    if set(start.codes) == {0}:
        return
    trial.check("saves in a row" in "".join(map(trial.cause, start.children)), "another cause")
    trial.struck_at = time.time()
    trial.finish(newest=trial.disk().newest)
