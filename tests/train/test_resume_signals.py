"""A run that a signal stops saves everything, and its exit code says whether it goes on."""

import signal
from pathlib import Path
from typing import Any

import pytest
from support.resumable import (
    BATCHES,
    STEPS,
    check_same,
    fit,
    rows,
    steps_saved,
    whole,
)
from support.tiers import only

import replicax as rx
from replicax.core.data_parallel import DataParallel

EVALUATED = {"eval_source": rows(20, 2)}


@pytest.mark.parametrize("at", only([2], [2, BATCHES - 1, STEPS - 1]))
@pytest.mark.parametrize("number", only([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_stops_it_with_everything_saved(
    dp: rx.DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: int
) -> None:
    step = DataParallel.step

    def signalled(self: DataParallel, state: Any, batch: Any) -> Any:
        if int(state.step) == at:
            signal.raise_signal(number)
        return step(self, state, batch)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(DataParallel, "step", signalled)
        first = fit(dp, tmp_path / "run", log_every=2, interrupt=rx.types.Interrupt(), **EVALUATED)
    assert (first.interrupted, first.saved, first.exit_code) == (True, True, 75)
    assert first.steps == int(first.state.step) == at + 1
    assert steps_saved(tmp_path / "run")[-1] == str(at + 1)
    assert signal.getsignal(number) is before
    found = fit(dp, tmp_path / "run", log_every=2, **EVALUATED)
    assert (found.interrupted, found.exit_code) == (False, 0)
    assert found.steps == STEPS - at - 1
    check_same(found, whole(dp, log_every=2, **EVALUATED), tmp_path / "run")


@pytest.mark.parametrize("at", [BATCHES, STEPS])
def test_a_signal_in_an_evaluation_has_it_done_whole_later(
    dp: rx.DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    settings = {"eval_source": rows(50, 2), "eval_batch_size": 10, "log_every": 2}
    evaluate, scored = DataParallel.evaluate, []

    def signalled(self: DataParallel, state: Any, batches: Any, **more: Any) -> Any:
        def one_by_one() -> Any:
            for batch in batches:
                if int(state.step) == at:
                    scored.append(batch)
                    if len(scored) == 2:
                        signal.raise_signal(signal.SIGTERM)
                yield batch

        return evaluate(self, state, one_by_one(), **more)

    with monkeypatch.context() as patch:
        patch.setattr(DataParallel, "evaluate", signalled)
        first = fit(dp, tmp_path / "run", interrupt=rx.types.Interrupt(), **settings)
    assert len(scored) == 2
    assert (first.steps, first.exit_code) == (at, 75)
    assert all(record.step < at for record in first.records if record.kind == "eval")
    check_same(fit(dp, tmp_path / "run", **settings), whole(dp, **settings), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"save_seconds": 1000.0}, 75), ({"save_seconds": None}, 1), ({"save_every": 100}, 75)],
)
def test_the_exit_code_says_whether_the_same_call_goes_on(
    dp: rx.DataParallel, tmp_path: Path, settings: dict[str, Any], code: int
) -> None:
    interrupt = rx.types.Interrupt()
    interrupt.signal = signal.SIGINT
    found = fit(dp, tmp_path / "run", **{"save_every": None, "interrupt": interrupt, **settings})
    assert (found.steps, found.exit_code) == (1, code)
    assert steps_saved(tmp_path / "run") == (["1"] if code == 75 else [])
