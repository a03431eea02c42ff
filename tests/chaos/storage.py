"""Faults of the disk that holds the checkpoints."""

import time
from pathlib import Path

from chaos.disk import Disk, can_mount, mounted
from chaos.failing_writes import STAGES
from chaos.sizes import SAVE_EVERY
from chaos.trial import Start, Trial

MOST_FREE_BYTES = 60_000
"""Less than a checkpoint of the trial's job takes, so that what is left is no help."""
_CURED_AFTER_SECONDS = 0.3


def full(trial: Trial) -> None:
    """No space left, for a while or until the run has stopped."""
    if not can_mount():
        _injected(trial, "ENOSPC")
        return
    free = trial.chance.randrange(MOST_FREE_BYTES)
    with mounted(trial.checkpoints) as disk:
        _disturbed(trial, "tmpfs full", lambda: disk.fill(free), disk.empty)


def read_only(trial: Trial) -> None:
    """Nothing can be written, for a while or until the run has stopped."""
    if not can_mount():
        _injected(trial, "EROFS")
        return
    with mounted(trial.checkpoints) as disk:
        _disturbed(trial, "tmpfs read-only", disk.lock, disk.unlock)


def io_error(trial: Trial) -> None:
    """Writing fails with EIO."""
    _injected(trial, "EIO")
