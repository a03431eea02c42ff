"""Every kind of run can be resumed: modes, layouts, sources, models, guards."""

from pathlib import Path
from typing import Any

import grain
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from support import cases
from support.resumable import (
    BATCH,
    bits,
    check_same,
    crashing,
    data_parallel,
    fit,
    model,
    rows,
    steps_saved,
    undisturbed,
)
from support.tiers import EXHAUSTIVE, exhaustive, only

import replicax as rx

run = undisturbed()

OVER_MODEL = [("hidden", PartitionSpec(None, "model")), ("out", PartitionSpec("model"))]
RULES = [("hidden", PartitionSpec(None, "data")), ("out", PartitionSpec("data"))]
KINDS: dict[str, dict[str, Any]] = {
    "single": {"mode": "single"},
    "exact": {"mode": "exact", "micro_shards": 8},
    "fsdp": {"layout": "fsdp"},
    "shard_map": {"mode": "shard_map"},
    "pmap": {"mode": "pmap"},
    "zero1": {"layout": "zero1"},
    "shard_map zero1": {"mode": "shard_map", "layout": "zero1"},
    "shard_map fsdp": {"mode": "shard_map", "layout": "fsdp"},
    "exact zero1": {"mode": "exact", "micro_shards": 8, "layout": "zero1"},
    "hybrid": {"layout": "fsdp", "axes": {"fsdp": 4}},
    "model": {"layout": rx.layout("fsdp", rules=OVER_MODEL), "axes": {"model": 2}},
    "rules": {"layout": RULES},
    "not donated": {"donate": False},
    "accumulated": {"accumulate": 2},
    "bfloat16": {"precision": "bfloat16"},
}


def stopped(dp: rx.DataParallel, folder: Path, at: int, **settings: Any) -> rx.Fit:
    """Check that a run stopped at step `at` and resumed ends as the undisturbed one."""
    with crashing(at):
        fit(dp, folder / "run", **settings)
    found = fit(dp, folder / "run", **settings)
    check_same(found, run(dp, **settings), folder / "run")
    return found


@pytest.mark.parametrize("kind", only(["exact", "fsdp"], KINDS))
def test_modes_and_layouts(tmp_path: Path, kind: str) -> None:
    dp = data_parallel(8, **KINDS[kind])
    stopped(dp, tmp_path, 7, log_every=2, eval_source=rows(20, 2))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nnx", {"mode": "jit"}),
        exhaustive(("nnx", {"mode": "shard_map"})),
        exhaustive(("nnx", {"mode": "exact", "micro_shards": 8})),
        exhaustive(("cnn", {"mode": "jit"})),
        exhaustive(("cnn", {"layout": "fsdp"})),
    ],
)
def test_statistics_and_keys_of_a_model(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """BatchNorm and Dropout: steps depend on more than the parameters."""
    case = cases.DROPOUT_CASES[name]
    dp = rx.DataParallel(case.loss, optax.adam(0.01), **settings)
    state = dp.init(case.model())
    assert name != "nnx" or state.extras
    arguments = {"source": case.source, "batch_size": 16, "model": case.model, "log_every": 2}
    stopped(dp, tmp_path, 5, **arguments, eval_source=case.source)


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["linen", "equinox", "gpt2", "weighted"])
def test_models_of_every_library(tmp_path: Path, name: str) -> None:
    case = cases.CASES[name]
    dp = rx.DataParallel(case.loss, optax.adamw(0.01))
    stopped(dp, tmp_path, 5, source=case.source, batch_size=16, model=case.model, log_every=2)


# Sources.


def batches() -> list[dict[str, np.ndarray]]:
    """Return the batches of a loader; the last one is short."""
    source = rows()
    return [
        {name: array[start : start + BATCH] for name, array in source.items()}
        for start in range(0, len(source["x"]), BATCH)
    ]


@pytest.mark.parametrize("at", only([5], [4, 5, 8]))
def test_a_loader_is_read_up_to_where_it_was(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    evaluated = {"eval_source": rows(20, 2), "eval_batch_size": BATCH}
    stopped(dp, tmp_path, at, source=batches(), batch_size=None, **evaluated)


@pytest.mark.parametrize("at", only([4], [4, 5]))
def test_a_grain_dataset(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    source = rows()
    each = [{name: array[row] for name, array in source.items()} for row in range(len(source["x"]))]
    stopped(dp, tmp_path, at, source=grain.MapDataset.source(each), log_every=2)


@pytest.mark.parametrize("source", [rows(), batches()], ids=["arrays", "a loader"])
def test_rows_of_a_process(dp: rx.DataParallel, tmp_path: Path, source: Any) -> None:
    stopped(dp, tmp_path, 8, source=rx.PerProcess(source), log_every=2)


def test_a_generator_is_read_anew_up_to_where_it_was(dp: rx.DataParallel, tmp_path: Path) -> None:
    with crashing(4):
        fit(dp, tmp_path / "run", source=iter(batches()), batch_size=BATCH, epochs=1)
    found = fit(dp, tmp_path / "run", source=iter(batches()), batch_size=BATCH, epochs=1)
    wanted = fit(dp, source=iter(batches()), batch_size=BATCH, epochs=1)
    check_same(found, wanted, tmp_path / "run")


@pytest.mark.parametrize("settings", [{"shuffle": False}, {"seed": 5}, {"log_every": 50}])
def test_orders_of_the_data(dp: rx.DataParallel, tmp_path: Path, settings: dict[str, Any]) -> None:
    stopped(dp, tmp_path, 7, **settings)


# Guards.


def with_bad(*indices: int) -> dict[str, np.ndarray]:
    """Return rows, some of which are NaN."""
    source = rows()
    source["x"][list(indices)] = np.nan
    return source


def bad_steps(fit: rx.Fit) -> list[int]:
    return [record.step for record in fit.records if record.kind == "skip"]


@pytest.mark.parametrize("at", only([3], [1, 2, 3, 4, 5, 6, 7, 8, 12]))
def test_bad_steps_around_the_stop(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    source = with_bad(17, 33, 50)  # unshuffled: batches 2, 3 and 4 of each epoch
    found = stopped(dp, tmp_path, at, source=source, shuffle=False, log_every=2)
    assert bad_steps(found) == [2, 3, 4, 7, 8, 9, 12, 13, 14]
    names = [record.examples for record in found.records if record.kind == "skip"]
    assert all(17 in examples for examples in names[::3] if examples)


def test_bad_steps_in_a_row_are_counted_on(dp: rx.DataParallel, tmp_path: Path) -> None:
    """Two before the stop and two after it make four."""
    source = with_bad(17, 33, 50, 66)
    settings = {"source": source, "shuffle": False, "max_bad_steps": 4}
    with crashing(3):
        fit(dp, tmp_path / "run", **settings)
    assert steps_saved(tmp_path / "run") == ["3"]
    with pytest.raises(rx.errors.DivergedError, match=r"4 steps in\b.*2 to 5"):
        fit(dp, tmp_path / "run", **settings)


def test_spikes_are_told_by_the_losses_before_the_stop(tmp_path: Path) -> None:
    """After 128 losses, over two starts, the one that is far above them is skipped."""
    source = rows(1280)
    source["y"][139 * 8 : 140 * 8] *= 1e4
    dp = data_parallel(2)
    settings = {"source": source, "batch_size": 8, "skip_spikes": True, "shuffle": False}
    settings |= {"steps": 150, "save_every": 100, "log_every": 50}
    found = stopped(dp, tmp_path, 139, **settings)
    assert bad_steps(found) == [140]


@pytest.mark.parametrize("at", only([4], [4, 9]))
def test_noise_is_measured_at_the_same_steps(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    found = stopped(dp, tmp_path, at, noise=rx.NoiseMeter(2), log_every=7)
    assert sum(record.kind == "noise" for record in found.records) > 2


@pytest.mark.parametrize(
    ("every", "settings", "restore"),
    [
        (2, {}, "stop"),
        (4, {"log_every": 7}, "restore"),
        exhaustive((2, {}, "restore")),
        exhaustive((4, {"log_every": 7}, "stop")),
    ],
)
def test_audits(
    dp: rx.DataParallel, tmp_path: Path, every: int, settings: dict[str, Any], restore: str
) -> None:
    audit = rx.Audit(every, restore)
    stopped(dp, tmp_path, 8, audit=audit, **settings)
    assert audit.clean


def test_the_state_that_is_given_does_not_matter(dp: rx.DataParallel, tmp_path: Path) -> None:
    """The state of the checkpoint replaces it."""
    with crashing(7):
        fit(dp, tmp_path / "run")
    given = dp.init({name: array * 0 for name, array in model().items()}, seed=9)
    found = fit(dp, tmp_path / "run", state=given)
    assert bits(found.state) == bits(run(dp).state)
    assert given.params["out"].is_deleted()
