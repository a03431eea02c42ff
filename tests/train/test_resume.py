"""A run that ended anywhere, and is started again, ends as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
from resumable import (
    BATCHES,
    STEPS,
    check_same,
    crashing,
    data_parallel,
    fit,
    rows,
    steps_saved,
    undisturbed,
)

import replicax as rx

EVALUATED = {"eval_source": rows(20, 2)}
run = undisturbed()


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    """One for all tests, so that its step is compiled once."""
    return data_parallel(8)


def stopped(dp: rx.DataParallel, folder: Path, at: int, of: str = "step", **settings: Any) -> None:
    """The run ends at step `at`, is gone on with, and ends as the undisturbed one."""
    with crashing(at, of):
        fit(dp, folder, **settings)
    check_same(fit(dp, folder, **settings), run(dp, **settings), folder)


@pytest.mark.parametrize("at", range(STEPS))
def test_at_any_step(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    stopped(dp, tmp_path / "run", at, log_every=2, **EVALUATED)
