"""A run that stopped anywhere and is restarted ends as if undisturbed."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
from support.resumable import (
    BATCHES,
    EPOCHS,
    STEPS,
    CrashError,
    bits,
    check_same,
    crashing,
    fit,
    rows,
    steps_saved,
    told,
    undisturbed,
    written,
)
from support.tiers import only

import replicax as rx
from replicax.core.data_parallel import DataParallel
from replicax.train.stopping import Stopping
from replicax.train.storage import Storage
from replicax.train.summary import derived

EVALUATED = {"eval_source": rows(20, 2)}
run = undisturbed()


def stopped(dp: rx.DataParallel, folder: Path, at: int, of: str = "step", **settings: Any) -> None:
    """Check that a run stopped at step `at` and resumed ends as the undisturbed one."""
    with crashing(at, of):
        fit(dp, folder, **settings)
    check_same(fit(dp, folder, **settings), run(dp, **settings), folder)


FIRST, BEFORE_A_SAVE, AT_A_SAVE, AFTER_A_SAVE, EPOCHS_END, LAST = 0, 2, 3, 4, BATCHES, STEPS - 1


CHOSEN = [BEFORE_A_SAVE, AT_A_SAVE, EPOCHS_END]


@pytest.mark.parametrize("at", only(CHOSEN, [FIRST, *CHOSEN, AFTER_A_SAVE, LAST]))
def test_at_a_step(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    stopped(dp, tmp_path / "run", at, log_every=2, **EVALUATED)


PAIRS = [
    (at, log_every, EVALUATED if (at + number) % 2 else {})
    for at in range(STEPS)
    for number, log_every in enumerate((1, 2, 7))
]


@pytest.mark.parametrize(("at", "log_every", "evaluated"), only([], PAIRS, PAIRS[::4]))
def test_at_any_step(
    dp: rx.DataParallel, tmp_path: Path, at: int, log_every: int, evaluated: dict[str, Any]
) -> None:
    """Pairs of values: each meets each of the others, without all products."""
    stopped(dp, tmp_path / "run", at, log_every=log_every, **evaluated)


SAVES = list(itertools.product([1, 4, 5, 6, 10, 14], [1, 2, 4, 5, 7]))


@pytest.mark.parametrize(("at", "save_every"), only([], SAVES, SAVES[::4]))
def test_with_saves_anywhere(dp: rx.DataParallel, tmp_path: Path, at: int, save_every: int) -> None:
    folder, settings = tmp_path / "run", {"log_every": 7, **EVALUATED}
    with crashing(at):
        fit(dp, folder, save_every=save_every, **settings)
    found = fit(dp, folder, save_every=save_every, **settings)
    check_same(found, run(dp, **settings), folder)


@pytest.mark.parametrize("at", [4, 7])
def test_of_a_number_of_steps(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    stopped(dp, tmp_path / "run", at, steps=8, log_every=7, **EVALUATED)


@pytest.mark.parametrize("at", only([BATCHES], [BATCHES, 2 * BATCHES, STEPS]))
def test_in_an_evaluation(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    stopped(dp, tmp_path / "run", at, "evaluate", log_every=2, **EVALUATED)


def test_at_every_second_step(dp: rx.DataParallel, tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"log_every": 2, "save_every": 1, **EVALUATED}
    for at in range(1, STEPS, 2):
        with crashing(at):
            fit(dp, folder, **settings)
        assert steps_saved(folder)[-1] == str(at)
    check_same(fit(dp, folder, **settings), run(dp, log_every=2, **EVALUATED), folder)


def test_before_the_last_save(
    dp: rx.DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Storage, *arguments: Any) -> None:
        raise CrashError

    monkeypatch.setattr(Storage, "finish", crash)
    with pytest.raises(CrashError):
        fit(dp, tmp_path / "run", log_every=2, **EVALUATED)
    monkeypatch.undo()
    found = fit(dp, tmp_path / "run", log_every=2, **EVALUATED)
    check_same(found, run(dp, log_every=2, **EVALUATED), tmp_path / "run")


@pytest.mark.parametrize("settings", [{}, {"steps": 7}, {"steps": STEPS}])
def test_a_finished_run_does_nothing_more(
    dp: rx.DataParallel, tmp_path: Path, settings: dict[str, int]
) -> None:
    folder = tmp_path / "run"
    first = fit(dp, folder, **settings, **EVALUATED)
    lines, saved = (folder / "records.jsonl").read_bytes(), steps_saved(folder)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("step", "evaluate"):
                patch.setattr(DataParallel, name, None)
            again = fit(dp, folder, **settings, **EVALUATED)
        assert bits(again.state) == bits(first.state)
        assert told(again.records) == told(first.records)
        assert again.metrics == first.metrics
        assert (again.steps, again.rows, again.interrupted) == (0, 0, False)
        assert (folder / "records.jsonl").read_bytes() == lines
        assert steps_saved(folder) == saved


def test_a_run_may_go_further_than_was_asked_for(dp: rx.DataParallel, tmp_path: Path) -> None:
    fit(dp, tmp_path / "run", epochs=1)
    found = fit(dp, tmp_path / "run")
    assert found.steps == STEPS - BATCHES
    check_same(found, run(dp), tmp_path / "run")


def test_a_run_of_steps_that_goes_further_has_the_same_state(
    dp: rx.DataParallel, tmp_path: Path
) -> None:
    fit(dp, tmp_path / "run", steps=7, log_every=2)
    found = fit(dp, tmp_path / "run", steps=12, log_every=2)
    wanted = run(dp, steps=12, log_every=2)
    assert bits(found.state) == bits(wanted.state)
    steps = [record["step"] for record in written(tmp_path / "run")]
    assert steps == [1, 2, 4, 5, 6, 7, 8, 10, 12]  # 7 ended a run, and was recorded
    assert sum(record.rows for record in found.records) == sum(r.rows for r in wanted.records)


# The message of a stop.


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

    with monkeypatch.context() as patch:
        patch.setattr(DataParallel, "step", signalled)
        first = fit(dp, tmp_path / "run", log_every=2, interrupt=rx.Interrupt(), **EVALUATED)
    assert (first.interrupted, first.saved, first.exit_code) == (True, True, 75)
    assert first.steps == int(first.state.step) == at + 1
    assert steps_saved(tmp_path / "run")[-1] == str(at + 1)
    found = fit(dp, tmp_path / "run", log_every=2, **EVALUATED)
    assert (found.interrupted, found.exit_code) == (False, 0)
    assert found.steps == STEPS - at - 1
    check_same(found, run(dp, log_every=2, **EVALUATED), tmp_path / "run")


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
        first = fit(dp, tmp_path / "run", interrupt=rx.Interrupt(), **settings)
    assert len(scored) == 2
    assert (first.steps, first.exit_code) == (at, 75)
    assert all(record.step < at for record in first.records if record.kind == "eval")
    check_same(fit(dp, tmp_path / "run", **settings), run(dp, **settings), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"save_seconds": 1000.0}, 75), ({"save_seconds": None}, 1), ({"save_every": 100}, 75)],
)
def test_the_exit_code_says_whether_the_same_call_goes_on(
    dp: rx.DataParallel, tmp_path: Path, settings: dict[str, Any], code: int
) -> None:
    interrupt = rx.Interrupt()
    interrupt.signal = signal.SIGINT
    found = fit(dp, tmp_path / "run", **{"save_every": None, "interrupt": interrupt, **settings})
    assert (found.steps, found.exit_code) == (1, code)
    assert steps_saved(tmp_path / "run") == (["1"] if code == 75 else [])


def test_a_signal_while_the_run_is_described_stops_it_after_a_step(
    dp: rx.DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled(*arguments: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        return derived(*arguments)

    monkeypatch.setattr("replicax.train.fit.derived", signalled)
    found = fit(dp, tmp_path / "run", interrupt=rx.Interrupt())
    assert (found.steps, found.exit_code) == (1, 75)


def test_saves_by_the_clock(dp: rx.DataParallel, tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"save_every": None, "save_seconds": 1e-6, "keep": 99}
    with crashing(STEPS - 1):
        fit(dp, folder, log_every=2, **settings, **EVALUATED)
    assert len(steps_saved(folder)) == STEPS - 1
    found = fit(dp, folder, log_every=2, **settings, **EVALUATED)
    assert found.steps == 1
    check_same(found, run(dp, log_every=2, **EVALUATED), folder)


def test_each_time_of_the_clock_is_one_save(
    dp: rx.DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter(range(1, 99))
    monkeypatch.setattr(Stopping, "_is_time", lambda self: next(asked) in (4, 11))
    fit(dp, tmp_path / "run", save_every=None, save_seconds=1.0)
    assert steps_saved(tmp_path / "run") == ["4", "11", str(STEPS)]


def test_a_clock_that_is_slow_saves_only_at_the_end(dp: rx.DataParallel, tmp_path: Path) -> None:
    fit(dp, tmp_path / "run", save_every=None, save_seconds=1000.0)
    assert steps_saved(tmp_path / "run") == [str(STEPS)]
    assert EPOCHS * BATCHES == STEPS
