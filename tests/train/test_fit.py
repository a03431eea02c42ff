"""`fit`: epochs or steps, exact evaluation, and records of every row."""

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.figures import refused
from support.fitted_line import fit, line, loss, model
from support.tiers import only
from support.training import slices
from support.waiting import Threads

import replicax as rx
from replicax.errors import ConfigError, DataError, LossError


def scalar_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((model["w"] * batch["x"] - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    """One for all tests, so that its step compiles once for each batch size."""
    return rx.DataParallel(loss, optax.sgd(0.1))


def of_kind(result: rx.types.Fit, kind: str) -> list[Any]:
    return [record for record in result.records if record.kind == kind]


@pytest.mark.parametrize(
    ("steps", "rows"), only([(3, 40), (7, 96)], [(1, 16), (2, 32), (3, 40), (4, 56), (7, 96)])
)
def test_steps_end_anywhere_in_an_epoch(
    dp: rx.DataParallel, steps: int, rows: int, prefetching: Threads
) -> None:
    result = fit(dp, steps=steps)
    assert (result.steps, result.rows) == (steps, rows)
    assert int(result.state.step) == steps
    assert not prefetching()


def test_mappings_are_dicts_of_arrays(dp: rx.DataParallel) -> None:
    plain = fit(dp, steps=4, eval_source=line(16, 1))
    mapped = fit(dp, UserDict(line(40)), steps=4, eval_source=UserDict(line(16, 1)))
    assert mapped.metrics == plain.metrics


@pytest.mark.parametrize("log_every", only([2, 100], [1, 2, 5, 100]))
def test_records_have_rising_steps_and_every_row(dp: rx.DataParallel, log_every: int) -> None:
    result = fit(dp, epochs=4, log_every=log_every, eval_source=line(20, 1))
    steps = [record.step for record in of_kind(result, "train")]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-1] == 12
    assert set(range(log_every, 13, log_every)) <= set(steps)
    assert sum(record.rows for record in of_kind(result, "train")) == result.rows == 160
    assert [record.step for record in of_kind(result, "eval")] == [3, 6, 9, 12]
    assert [record.rows for record in of_kind(result, "eval")] == [20] * 4
    assert all(set(record.metrics) == {"loss", "error"} for record in result.records)


@pytest.mark.parametrize("rows", only([37], [16, 37, 5]))
def test_evaluation_counts_every_row_once(dp: rx.DataParallel, rows: int) -> None:
    scored = line(rows, 1)
    result = fit(dp, epochs=1, eval_source=scored)
    w, b = (float(result.state.params[name]) for name in "wb")
    error = w * scored["x"].astype(np.float64) + b - scored["y"]
    (record,) = of_kind(result, "eval")
    assert record.rows == rows
    assert record.metrics["loss"] == pytest.approx(np.mean(error**2), rel=1e-5)
    assert record.metrics["error"] == pytest.approx(np.mean(np.abs(error)), rel=1e-5)


def test_evaluation_may_have_a_batch_size_of_its_own(dp: rx.DataParallel) -> None:
    small = fit(dp, epochs=1, eval_source=line(40, 1), eval_batch_size=8)
    large = fit(dp, epochs=1, eval_source=line(40, 1), eval_batch_size=40)
    assert small.metrics["loss"] == pytest.approx(large.metrics["loss"], rel=1e-5)


def test_arrays_are_shuffled_anew_each_epoch_from_the_seed() -> None:
    seen: list[list[int]] = []

    def watched(model: Any, batch: Any, key: Any) -> Any:
        jax.debug.callback(lambda rows: seen.append(np.asarray(rows).tolist()), batch["row"])
        return model["w"] * batch["row"]

    def orders(**settings: Any) -> list[list[int]]:
        seen.clear()
        one = rx.DataParallel(watched, optax.sgd(0.0), mode="single")
        result = rx.fit(
            one,
            one.init({"w": jnp.float32(0)}),
            {"row": np.arange(16)},
            batch_size=16,
            epochs=2,
            progress=False,
            **settings,
        )
        jax.block_until_ready(result.state)
        jax.effects_barrier()
        return list(seen)

    first = orders(seed=1)
    assert [sorted(order) for order in first] == [list(range(16))] * 2
    assert first[0] != first[1]
    assert first == orders(seed=1)
    assert first != orders(seed=2)
    assert orders(shuffle=False) == [list(range(16))] * 2


def test_a_generator_lasts_one_epoch(dp: rx.DataParallel) -> None:
    def batches() -> Iterator[dict[str, np.ndarray]]:
        yield line(16)

    assert fit(dp, batches(), epochs=1).rows == 16
    with pytest.raises(ConfigError, match="epochs=2"):
        fit(dp, batches(), epochs=2)
    with pytest.raises(DataError, match="generator"):
        fit(dp, batches(), steps=2)


def test_evaluation_on_a_loader_counts_every_row_once(dp: rx.DataParallel) -> None:
    looped = fit(dp, epochs=2, eval_source=slices(line(20, 1), 16))
    whole = fit(dp, epochs=2, eval_source=line(20, 1))
    assert [record.rows for record in of_kind(looped, "eval")] == [20, 20]
    assert looped.metrics == pytest.approx(whole.metrics, rel=1e-6)


@pytest.mark.promise("outside.late-refusals")
@pytest.mark.parametrize(
    ("settings", "evaluations"),
    [
        ({"epochs": 1}, 1),
        ({"steps": 1}, 1),
        ({"epochs": 2, "every_epochs": 2}, 1),
        ({"epochs": 2, "every_epochs": None}, 1),
        ({"epochs": 2}, 0),
        ({"steps": 9}, 0),
        ({"epochs": 1, "at_start": True}, 0),
        ({"epochs": 1, "every_steps": 2}, 0),
    ],
    ids=str,
)
def test_a_generator_is_evaluated_once_or_refused_at_the_start(
    dp: rx.DataParallel, settings: dict[str, Any], evaluations: int
) -> None:
    length = {name: settings[name] for name in ("epochs", "steps") if name in settings}
    when = {name: each for name, each in settings.items() if name not in length}
    plan = rx.Evaluation(iter([line(16, 1)]), **when)
    if not evaluations:
        with pytest.raises(ConfigError, match="generator"):
            fit(dp, eval_source=plan, **length)
        return
    (record,) = of_kind(fit(dp, eval_source=plan, **length), "eval")
    assert record.rows == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["epochs=None", "steps=None", "one length"]),
        ({"epochs": 1, "steps": 1}, ["epochs=1", "steps=1", "one length"]),
        ({"epochs": 0}, ["epochs=0", "at least 1"]),
        ({"steps": -1}, ["steps=-1", "at least 1"]),
        ({"epochs": 1, "log_every": 0}, ["log_every=0", "at least 1"]),
        ({"epochs": 1, "batch_size": 0}, ["batch_size=0"]),
        ({"epochs": 1, "batch_size": 7}, ["7 rows", "8 replicas"]),
        ({"epochs": 1, "batch_size": None}, ["batch_size is missing"]),
        ({"epochs": 1, "eval_source": line(9), "eval_batch_size": 4}, ["4 rows", "8 replicas"]),
        ({"epochs": 1, "eval_source": line(9), "eval_batch_size": 0}, ["batch_size=0"]),
        ({"epochs": 1, "eval_source": 5}, ["int"]),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_written(
    dp: rx.DataParallel, settings: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with refused(ConfigError, *words):
        fit(dp, run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def scalar() -> rx.DataParallel:
    return rx.DataParallel(scalar_loss, optax.sgd(0.1))


class TestScalarLoss:
    """One number a batch is exact only where no batch has padding."""

    def test_a_short_batch_that_divides_over_the_devices_is_not_padded(
        self, scalar: rx.DataParallel
    ) -> None:
        one = rx.DataParallel(scalar_loss, optax.sgd(0.1), mode="single")
        found, wanted = (fit(each, line(40), epochs=1) for each in (scalar, one))
        assert found.records[-1].metrics["loss"] == pytest.approx(
            wanted.records[-1].metrics["loss"], rel=1e-6
        )

    def test_padding_in_the_last_batch_is_refused_at_the_first(
        self, scalar: rx.DataParallel
    ) -> None:
        state = scalar.init(model())
        with pytest.raises(LossError, match=r"11 of 16 rows.*one value\b.*row\b"):
            rx.fit(scalar, state, line(37), batch_size=16, epochs=1, progress=False)
        assert int(state.step) == 0  # not consumed

    def test_padding_of_the_evaluation_is_refused_after_one_step(
        self, scalar: rx.DataParallel, tmp_path: Path
    ) -> None:
        with pytest.raises(LossError, match=r"12 of 16 rows"):
            fit(
                scalar,
                line(160),
                epochs=1,
                log_every=1,
                eval_source=line(20, 1),
                run_dir=tmp_path / "run",
            )
        assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 1


def test_a_state_that_was_trained_can_be_trained_on(dp: rx.DataParallel) -> None:
    first = fit(dp, steps=2)
    second = rx.fit(dp, first.state, line(40), batch_size=16, steps=2, progress=False)
    assert (second.steps, int(second.state.step)) == (2, 4)


def test_a_relative_folder_stays_where_the_run_began(
    dp: rx.DataParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves(rx.Hook):
        def step(self, run: Any, step: Any) -> None:
            monkeypatch.chdir("/")

    monkeypatch.chdir(tmp_path)
    result = fit(dp, epochs=2, run_dir="mine", saving=rx.Saving(every=2), hooks=[Leaves()])
    assert (result.steps, result.failed_hooks) == (6, ())
    assert any((tmp_path / "mine/checkpoints").glob("6*"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fit(dp, epochs=2, run_dir="~/mine").steps == 0
    with pytest.raises(ConfigError):
        fit(dp, epochs=2, run_dir="")
