"""Runs that do several steps in each call are the same runs."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.resumable import (
    bits,
    check_same,
    crashing,
    data_parallel,
    fit,
    rows,
    told,
    written,
)
from support.training import normals, slices

import replicax as rx
from replicax.core.data_parallel import DataParallel
from replicax.train.dispatched import RunPosition
from replicax.train.hooks.call_sizes import CallSizes

EVALUATED = {"eval_source": rows(20, 2)}


def calls_of(run: Any) -> list[int]:
    """Return the steps of each call that `run` does."""
    counts, one, several = list[int](), DataParallel.step, DataParallel.steps

    def step(self: DataParallel, *given: Any) -> Any:
        counts.append(1)
        return one(self, *given)

    def steps(self: DataParallel, state: Any, batches: Any) -> Any:
        counts.append(len(batches))
        return several(self, state, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataParallel, "step", step)
        patch.setattr(DataParallel, "steps", steps)
        run()
    return counts


def test_the_next_run_of_a_program_traces_nothing(tmp_path: Path) -> None:
    traced = []

    def loss(model: Any, batch: Any, key: Any) -> Any:
        traced.append(batch["x"].shape)
        return (batch["x"] @ model["w"] - batch["y"]) ** 2

    dp, draw = rx.DataParallel(loss, optax.sgd(0.1), mesh=rx.make_mesh(2)), normals(0)
    source, model = {"x": draw(32, 3), "y": draw(32)}, {"w": np.ones(3, np.float32)}
    for name in ("one", "two"):
        before, folder = len(traced), tmp_path / name
        rx.fit(dp, dp.init(model), source, batch_size=8, steps=4, run_dir=folder, progress=False)
    assert 0 < before == len(traced)


@pytest.mark.promise("run.several-steps-a-call")
@pytest.mark.parametrize("mode", ["jit", "shard_map", "exact"])
@pytest.mark.parametrize("log_every", [1, 4])
def test_records_and_state_are_those_of_single_steps(mode: str, log_every: int) -> None:
    """Epochs of 5 batches, of which the last is short, in calls of 2."""
    dp = data_parallel(mode=mode)
    alone, found = (
        fit(dp, log_every=log_every, steps_per_call=steps, **EVALUATED) for steps in (1, 2)
    )
    if dp.mode.bitwise:
        assert bits(found.state) == bits(alone.state)
        assert told(found.records) == told(alone.records)
    assert [(r.kind, r.step, r.epoch, r.rows) for r in found.records] == [
        (r.kind, r.step, r.epoch, r.rows) for r in alone.records
    ]
    for one, other in zip(found.records, alone.records, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-5)
    assert (found.steps, found.rows, found.step) == (15, 225, 15)


@pytest.mark.parametrize("at", [3, 6, 7, 11, 12])
def test_a_run_that_resumes_does_the_same_calls(at: int, tmp_path: Path) -> None:
    """With the same bits in every mode: a program of several steps may round in its own way."""
    settings = {"steps_per_call": 3, "save_every": 6, "log_every": 2, **EVALUATED}
    dp = data_parallel(4)
    undisturbed = fit(dp, tmp_path / "whole", **settings)
    with crashing(at):
        fit(dp, tmp_path / "run", **settings)
    found = fit(dp, tmp_path / "run", **settings)
    check_same(found, undisturbed, tmp_path / "run")


def test_skipped_steps_are_named() -> None:
    """The examples of a bad step, though it was one of several."""
    data = rows()
    data["x"][[20, 40]] = np.nan
    settings = {"source": data, "shuffle": False, "guard": rx.Guard(max_bad_steps=9)}
    alone, found = (fit(data_parallel(2), steps_per_call=n, **settings) for n in (1, 4))
    skips = [(r.step, r.examples) for r in found.records if r.kind == "skip"]
    assert skips == [(r.step, r.examples) for r in alone.records if r.kind == "skip"]
    assert [step for step, _ in skips] == [2, 3, 7, 8, 12, 13]
    assert all({20, 40} & set(examples or ()) for _, examples in skips)


def sizes(call_sizes: CallSizes, epoch: int, begun: int) -> list[int | None]:
    """Return the calls of an epoch of 10 batches."""
    found, number = list[int | None](), 0
    while number < 10:
        size = call_sizes.sizes(RunPosition(begun + number, epoch, number))(number)
        found.append(size)
        number += size or 1
    return found


@pytest.mark.parametrize(
    ("call_sizes", "first", "second"),
    [
        (CallSizes(4, 10), [None, 4, 4, None], [4, 4, 2]),
        (CallSizes(4, 10, intervals=(5,)), [None, 4, 4, None], [4, None, 4, None]),
        (CallSizes(4, 10, total=16), [None, 4, 4, None], [4, *[None] * 6]),
        (CallSizes(64, 10), [None] * 10, [10]),
        (CallSizes(4, None), [None, 4, 4, 4], [4, 4, 4]),
        (CallSizes(1, 10), [None] * 10, [None] * 10),
    ],
)
def test_where_calls_end(call_sizes: CallSizes, first: list[Any], second: list[Any]) -> None:
    assert (sizes(call_sizes, 0, 0), sizes(call_sizes, 1, 10)) == (first, second)


def test_calls_end_where_the_run_looks_at_the_state(tmp_path: Path) -> None:
    audit = rx.hooks.Audit(every=3)
    settings = {"steps": 13, "steps_per_call": 4, "save_every": 6, "audit": audit}
    counts = calls_of(lambda: fit(data_parallel(2), tmp_path / "run", **settings))
    assert sum(counts) == 13
    ends = set(np.cumsum(counts))
    assert {3, 6, 9, 12} <= ends
    assert audit.clean == 5  # with that of the start


class Looks(rx.Hook):
    """A hook of a user's, which looks at every state."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def dispatched(self, run: Any, step: Any) -> None:
        self.seen.append(int(run.state.step))


def test_a_hook_that_looks_at_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    looks = Looks()
    fit(data_parallel(2), steps=5, steps_per_call=4, hooks=[looks], progress=True)
    assert looks.seen == [1, 2, 3, 4, 5]
    assert "Looks" in next(line for line in _lines(capsys) if line.startswith("calls"))


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_small_steps_are_put_together(capsys: pytest.CaptureFixture[str]) -> None:
    """If the run is long; `rx.Run` yields a batch for each step unless it is told otherwise."""
    long = {"epochs": 400, "steps_per_call": None, "progress": True}
    counts = calls_of(lambda: fit(data_parallel(2), **long))
    assert counts == [1] * 5 + [5] * 399
    assert sum(line.startswith("calls  64 steps each") for line in _lines(capsys)) == 1
    assert set(calls_of(lambda: fit(data_parallel(2), epochs=3, steps_per_call=None))) == {1}
    assert set(calls_of(lambda: fit(data_parallel(2, mode="exact"), **long, steps=None))) == {1}


def test_loaders_of_batches(tmp_path: Path) -> None:
    """Their batches are stacked, and the run resumes from them."""
    settings = {"source": slices(rows(), 15), "batch_size": 15, "log_every": 1, "save_every": 4}
    dp = data_parallel(1)
    undisturbed = fit(dp, tmp_path / "whole", steps_per_call=2, **settings)
    alone = fit(dp, tmp_path / "alone", **settings)
    assert [r["step"] for r in written(tmp_path / "whole")] == list(range(1, 16))
    np.testing.assert_allclose(
        *(jax.tree.leaves(each.state.params)[0] for each in (undisturbed, alone)), rtol=1e-5
    )
    with crashing(8):
        fit(dp, tmp_path / "run", steps_per_call=2, **settings)
    found = fit(dp, tmp_path / "run", steps_per_call=2, **settings)
    assert bits(found.state) == bits(undisturbed.state)


def test_the_rate_of_each_record_is_that_of_its_step() -> None:
    """Where it is in the state, it is looked at after every step."""
    schedule = optax.linear_schedule(1.0, 0.0, 20)

    def run(steps: int) -> list[float]:
        dp = rx.DataParallel(
            data_parallel(1).loss,
            optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
            mesh=rx.make_mesh(1),
        )
        hooks = [rx.hooks.LearningRate()]
        found = fit(dp, steps=9, log_every=1, steps_per_call=steps, hooks=hooks)
        return [(r.figures or {})["learning_rate"] for r in found.records]

    assert run(4) == run(1)
