"""`rx.Run`: the loop that users write, its errors, and what hooks may ask of it."""

import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.resumable import check_same, settle, steps_saved

import replicax as rx
from replicax.errors import ConfigError, StateError

ROWS, BATCH, EPOCH = 28, 8, 4
STEPS = 3 * EPOCH
X = np.random.default_rng(0).normal(size=ROWS).astype(np.float32)
SOURCE = {"x": X, "y": 2 * X + 1}
EVERY = rx.Saving(every=5)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (model["w"] * batch["x"] + model["b"] - batch["y"]) ** 2


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    return rx.DataParallel(loss, optax.adam(0.05), ema=0.9)


def run(dp: rx.DataParallel, *hooks: rx.Hook, **settings: Any) -> rx.Run:
    settings = {"steps": STEPS, "progress": False, "log_every": 2, "saving": EVERY, **settings}
    state = dp.init({"w": jnp.float32(0), "b": jnp.float32(0)})
    return rx.Run(dp, state, SOURCE, batch_size=BATCH, hooks=hooks, **settings)


def whole(running: rx.Run, leave_at: int | None = None) -> rx.types.Fit:
    with running:
        for batch in running:
            running.step(batch)
            if running.place.step == leave_at:
                break
    return running.result


class Asks(rx.Hook):
    """Calls a method of the run after some of its steps."""

    def __init__(self, what: Callable[[Any], None], *at: int) -> None:
        self._what, self._at = what, at

    def dispatched(self, run: Any, step: Any) -> None:
        if step.place.step in self._at:
            self._what(run)


class Counts(rx.Hook):
    """Has a state: the number of finished steps, and the sum of their losses."""

    def __init__(self) -> None:
        self.steps, self.total = 0, 0.0
        self.began: list[tuple[int, float]] = []

    def start(self, run: Any) -> None:
        self.began.append((self.steps, self.total))

    def step(self, run: Any, step: Any) -> None:
        self.steps, self.total = self.steps + 1, self.total + float(step.metrics["loss"])

    def figures(self, run: Any, record: Any) -> dict[str, float]:
        return {"finished": self.steps}

    def save_state(self) -> Any:
        return [self.steps, self.total]

    def load_state(self, state: Any) -> None:
        self.steps, self.total = state


class Ended(rx.Hook):
    """Remembers how its runs ended."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def end(self, run: Any) -> None:
        self.errors.append(run.error)


def evaluated(result: rx.types.Fit) -> list[int]:
    return [record.step for record in result.records if record.kind == "eval"]


# The loop.


@pytest.mark.promise("run.next-batch")
def test_it_gives_the_exact_batch_that_is_next(dp: rx.DataParallel, tmp_path: Path) -> None:
    def rows(running: rx.Run, leave_at: int | None = None) -> Iterator[list[int]]:
        with running:
            for batch in running:
                yield np.asarray(batch.index)[: batch.rows].tolist()
                running.step(batch)
                if running.place.step == leave_at:
                    break

    expected = list(rows(run(dp)))
    assert sorted(itertools.chain(*expected[:EPOCH])) == list(range(ROWS))
    assert expected[:EPOCH] != expected[EPOCH : 2 * EPOCH]
    found = list(rows(run(dp, run_dir=tmp_path), 6))
    assert found + list(rows(run(dp, run_dir=tmp_path))) == expected


@pytest.mark.promise("run.break-resumes")
@pytest.mark.parametrize("leave_at", [3, EPOCH, 5])
def test_a_loop_that_is_left_early_goes_on_later(
    dp: rx.DataParallel, tmp_path: Path, leave_at: int
) -> None:
    first = whole(run(dp, Counts(), run_dir=tmp_path), leave_at)
    assert (first.step, first.interrupted, first.stopped, first.saved) == (
        *(leave_at, False, None),
        True,
    )
    assert steps_saved(tmp_path)[-1] == str(leave_at)
    counts = Counts()
    found = whole(run(dp, counts, run_dir=tmp_path))
    assert found.steps == STEPS - leave_at
    assert counts.began[0][0] == leave_at
    wanted = Counts()
    check_same(found, whole(run(dp, wanted)), tmp_path)
    assert counts.save_state() == wanted.save_state()


@pytest.mark.promise("run.one-step-a-batch")
def test_a_batch_is_stepped_on_once(dp: rx.DataParallel) -> None:
    with run(dp) as running:
        batches = iter(running)
        first = next(batches)
        with pytest.raises(StateError, match="batch other"):
            running.step(next(iter(dp.feed(SOURCE, BATCH))))
        assert float(running.step(first)["loss"]) > 0
        with pytest.raises(StateError, match="twice"):
            running.step(first)
        next(batches)
        with pytest.raises(StateError, match="batch other"):
            running.step(first)
        with pytest.raises(StateError, match=r"no step\b.*batch 1 of epoch 0"):
            next(batches)


def test_a_run_is_entered_first(dp: rx.DataParallel) -> None:
    running = run(dp)
    for use in (
        lambda: next(iter(running)),
        lambda: running.step(next(iter(dp.feed(SOURCE, BATCH)))),
        lambda: running.result,
        lambda: running.stop("enough"),
        running.save,
        running.evaluate,
    ):
        with pytest.raises(StateError):
            use()
    assert not hasattr(running, "another")


def test_one_run_at_a_time_takes_the_results_of_steps(dp: rx.DataParallel) -> None:
    with run(dp) as first:
        with pytest.raises(StateError), run(dp):
            pass
        for batch in first:
            first.step(batch)
    with run(dp) as second:
        second.step(next(iter(second)))


def test_what_is_raised_in_the_loop_ends_the_run_as_a_kill_would(
    dp: rx.DataParallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistake(running: rx.Run) -> None:
        with running:
            for batch in running:
                running.step(batch)
                if running.place.step == 7:
                    settle()
                    raise ZeroDivisionError

    ended = Ended()
    running = run(dp, ended, run_dir=tmp_path, progress=True)
    with pytest.raises(ZeroDivisionError):
        mistake(running)
    assert [type(error) for error in ended.errors] == [ZeroDivisionError]
    assert not hasattr(running, "result")
    assert "done" not in capsys.readouterr().out
    found = whole(run(dp, ended, run_dir=tmp_path))
    assert ended.errors[1:] == [None]
    assert found.steps == STEPS - 5
    check_same(found, whole(run(dp)), tmp_path)


# Requests of hooks.


def test_a_hook_stops_the_run_as_if_it_were_done(dp: rx.DataParallel) -> None:
    asks = Asks(lambda run: run.stop("enough"), 5, 6)
    result = whole(run(dp, asks, eval_source=SOURCE))
    assert (result.step, result.stopped, result.exit_code) == (5, "enough", 0)
    assert evaluated(result) == [EPOCH, 5]
    assert whole(run(dp)).stopped is None


def test_a_hook_has_the_run_saved(dp: rx.DataParallel, tmp_path: Path) -> None:
    rare = rx.Saving(every=1000, keep=9)
    asks = Asks(lambda run: run.save(), 2, 7)
    whole(run(dp, asks, run_dir=tmp_path, saving=rare))
    assert steps_saved(tmp_path) == ["2", "7", str(STEPS)]
    with pytest.raises(ConfigError, match="run_dir"):
        whole(run(dp, asks))


def test_a_hook_has_the_run_evaluated(dp: rx.DataParallel) -> None:
    asks = Asks(lambda run: run.evaluate(), 2, 7)
    plan = rx.Evaluation(SOURCE, every_epochs=None)
    assert evaluated(whole(run(dp, asks, eval_source=plan))) == [2, 7, STEPS]


@pytest.mark.promise("run.failing-hook")
def test_a_hook_that_raises_is_left_out_and_changes_nothing(
    dp: rx.DataParallel, tmp_path: Path
) -> None:
    def fail(run: Any) -> None:
        raise KeyError("a mistake")

    called: list[int] = []
    asks = Asks(fail, 3)
    asks.step = lambda run, step: called.append(step.place.step)  # type: ignore[method-assign]
    found = whole(run(dp, asks, Counts(), run_dir=tmp_path))
    assert found.failed_hooks == ("Asks",)
    check_same(found, whole(run(dp, Counts())), tmp_path)
    assert called == []


class Fails(rx.Hook):
    """Fails at one point; the hook has no run."""

    def __init__(self, at: str, state: Any = 1) -> None:
        self._at, self._state = at, state

    def save_state(self) -> Any:
        return self._state

    def load_state(self, state: Any) -> None:
        if self._at == "load_state":
            raise KeyError("a field of an older version")

    def summary(self) -> list[str]:
        if self._at == "summary":
            raise KeyError("nothing to sum up")
        return []


@pytest.mark.parametrize("state", [np.float32(1), float("nan"), {"best": jnp.float32(1)}])
def test_a_hook_whose_state_is_no_json_is_left_out(
    dp: rx.DataParallel, tmp_path: Path, state: Any
) -> None:
    found = whole(run(dp, Fails("save_state", state), run_dir=tmp_path))
    assert found.failed_hooks == ("Fails",)
    check_same(found, whole(run(dp)), tmp_path)


@pytest.mark.parametrize("point", ["load_state", "summary"])
def test_a_hook_that_fails_outside_of_the_loop_is_left_out(
    dp: rx.DataParallel, tmp_path: Path, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole(run(dp, Fails("nowhere"), run_dir=tmp_path), 6)
    found = whole(run(dp, Fails(point), run_dir=tmp_path, progress=True))
    check_same(found, whole(run(dp)), tmp_path)
    assert re.search(rf"ALARM  hook Fails .*failed .*{point} at step", capsys.readouterr().err)


def test_a_figure_tells_of_the_step_of_its_record(dp: rx.DataParallel, tmp_path: Path) -> None:
    whole(run(dp, Counts(), run_dir=tmp_path, log_every=3), 2)  # the next record is in the air
    found = whole(run(dp, Counts(), run_dir=tmp_path, log_every=3))
    assert {(r.step, int((r.figures or {})["finished"])) for r in found.records} == {
        (step, step) for step in (1, 3, 4, 6, 8, 9, 12)
    }


def test_a_hook_that_sleeps_is_named_where_the_time_went(
    dp: rx.DataParallel, tmp_path: Path
) -> None:
    asks = Asks(lambda run: time.sleep(0.2), *range(1, STEPS + 1))
    goodput = whole(run(dp, asks, Counts(), run_dir=tmp_path)).goodput
    assert goodput is not None
    assert goodput.hooks["Asks"] >= 0.2 * STEPS
    assert "(most Asks)" in " ".join(goodput.lines())
    assert goodput.seconds["hooks"] > 2.0


# When evaluation happens, and on what.


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ({}, [4, 8, 12]),
        ({"every_epochs": 2}, [8, 12]),
        ({"every_epochs": None, "every_steps": 5}, [5, 10, 12]),
        ({"every_steps": 3}, [3, 4, 6, 8, 9, 12]),
        ({"at_start": True, "every_epochs": None}, [0, 12]),
    ],
)
def test_when_it_is_evaluated(dp: rx.DataParallel, plan: dict[str, Any], steps: list[int]) -> None:
    assert evaluated(whole(run(dp, eval_source=rx.Evaluation(SOURCE, **plan)))) == steps


def test_an_evaluation_at_the_start_is_done_once(dp: rx.DataParallel, tmp_path: Path) -> None:
    plan = rx.Evaluation(SOURCE, at_start=True, every_steps=5)
    whole(run(dp, run_dir=tmp_path, eval_source=plan), 5)
    found = whole(run(dp, run_dir=tmp_path, eval_source=plan))
    assert evaluated(found) == [0, 4, 5, 8, 10, 12]
    check_same(found, whole(run(dp, eval_source=plan)), tmp_path)


def test_several_sets_so_many_rows_and_another_loss(dp: rx.DataParallel) -> None:
    def far(model: Any, batch: Any, key: Any) -> Any:
        values = loss(model, batch, key)
        return values, {"far": values > 1}

    sets = {"all": SOURCE, "few": {name: each[:5] for name, each in SOURCE.items()}}
    plan = rx.Evaluation(sets=sets, every_epochs=None, max_rows=10, loss=far)
    result = whole(run(dp, eval_source=plan))
    (record,) = [record for record in result.records if record.kind == "eval"]
    assert record.rows == 16 + 5
    w, b = (float(result.state.params[name]) for name in "wb")
    for name, x in (("all", X[:16]), ("few", X[:5])):
        errors = (w * x + b - 2 * x - 1) ** 2
        assert record.metrics[f"{name}/loss"] == pytest.approx(np.mean(errors), rel=1e-4)
        assert record.metrics[f"{name}/far"] == pytest.approx(np.mean(errors > 1))


def test_it_is_evaluated_with_the_average(dp: rx.DataParallel) -> None:
    result = whole(run(dp, eval_source=rx.Evaluation(SOURCE, ema=True)))
    own, average = (
        dp.evaluate(result.state, dp.feed(SOURCE, BATCH), ema=ema)["loss"] for ema in (False, True)
    )
    assert result.metrics["loss"] == pytest.approx(average, rel=1e-6)
    assert abs(own - average) > 1e-2


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({}, "sets="),
        ({"source": SOURCE, "sets": {"all": SOURCE}}, "sets="),
        ({"source": SOURCE, "every_steps": 0}, "every_steps=0"),
        ({"source": SOURCE, "max_rows": -1}, "max_rows=-1"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rx.Evaluation(**plan)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"minutes": -1.0}, {"keep": 0}])
def test_a_saving_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        rx.Saving(**wrong)
