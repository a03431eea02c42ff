"""A run that is cut anywhere goes on and ends as the uncut run, to the bit and the record."""

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
    BATCHES,
    STEPS,
    bits,
    check_same,
    crashing,
    data_parallel,
    fit,
    model,
    resumed,
    rows,
    steps_saved,
    whole,
)
from support.tiers import exhaustive, only

import replicax as rx
from replicax.core.data_parallel import DataParallel

EVALUATED = {"eval_source": rows(20, 2)}


# Where it is cut.


BEFORE_A_SAVE, AT_A_SAVE, AFTER_A_SAVE, LAST = 2, 3, 4, STEPS - 1
CHOSEN = [(at, 3, 2, True) for at in (BEFORE_A_SAVE, AT_A_SAVE, BATCHES)]
ENDS = [(at, 3, 2, True) for at in (0, AFTER_A_SAVE, LAST)]
STEPS_AND_LOGS = [
    (at, 3, log_every, (at + number) % 2 == 1)
    for at in range(STEPS)
    for number, log_every in enumerate((1, 2, 7))
]
"""Pairs of values: each meets each of the others, without all products."""
SAVES = [(at, save_every, 7, True) for at in (1, 4, 5, 6, 10, 14) for save_every in (1, 2, 4, 5, 7)]


@pytest.mark.parametrize(
    ("at", "save_every", "log_every", "evaluated"),
    only(
        CHOSEN,
        dict.fromkeys([*CHOSEN, *ENDS, *STEPS_AND_LOGS, *SAVES]),
        [*ENDS, *STEPS_AND_LOGS[::4], *SAVES[::4]],
    ),
)
def test_at_any_step(
    dp: rx.DataParallel, tmp_path: Path, at: int, save_every: int, log_every: int, evaluated: bool
) -> None:
    settings = {"save_every": save_every, "log_every": log_every}
    resumed(dp, tmp_path / "run", at, **settings, **(EVALUATED if evaluated else {}))


@pytest.mark.parametrize(
    ("at", "of"),
    only(
        [(BATCHES, "evaluate"), (STEPS, "finish")],
        [(BATCHES, "evaluate"), (2 * BATCHES, "evaluate"), (STEPS, "evaluate"), (STEPS, "finish")],
    ),
)
def test_in_an_evaluation_and_before_the_last_save(
    dp: rx.DataParallel, tmp_path: Path, at: int, of: str
) -> None:
    resumed(dp, tmp_path / "run", at, of, log_every=2, **EVALUATED)


@pytest.mark.promise("run.kill-leaves-no-trace")
def test_at_every_second_step(dp: rx.DataParallel, tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"log_every": 2, "save_every": 1, **EVALUATED}
    for at in range(1, STEPS, 2):
        with crashing(at):
            fit(dp, folder, **settings)
        assert steps_saved(folder)[-1] == str(at)
    check_same(fit(dp, folder, **settings), whole(dp, **settings), folder)


def test_with_saves_by_the_clock(dp: rx.DataParallel, tmp_path: Path) -> None:
    saving = {"save_every": None, "save_seconds": 1e-6, "keep": 99}
    found = resumed(dp, tmp_path / "run", LAST, log_every=2, **saving, **EVALUATED)
    assert found.steps == 1
    assert steps_saved(tmp_path / "run") == [str(step) for step in range(1, STEPS + 1)]


# Where nothing cut it.


@pytest.mark.parametrize("settings", [{}, {"steps": 7}, {"steps": STEPS}])
def test_a_finished_run_does_nothing_more(
    dp: rx.DataParallel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder, settings = tmp_path / "run", {"save_every": 7, **settings, **EVALUATED}
    first = fit(dp, folder, **settings)
    lines, saved = (folder / "records.jsonl").read_bytes(), steps_saved(folder)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("step", "evaluate"):
                patch.setattr(DataParallel, name, None)
            again = fit(dp, folder, **settings)
        check_same(again, first, folder)
        assert again.metrics == first.metrics
        assert (again.steps, again.rows, again.interrupted) == (0, 0, False)
        assert (folder / "records.jsonl").read_bytes() == lines
        assert steps_saved(folder) == saved


@pytest.mark.parametrize("first", [{"epochs": 2}, {"steps": BATCHES + 1}])
def test_a_run_that_is_further_than_is_asked_for_is_complete(
    dp: rx.DataParallel, tmp_path: Path, first: dict[str, Any]
) -> None:
    """Also with a loader, whose length is told by its end."""
    data = rows(BATCH * BATCHES)
    batches = [
        {name: leaf[at : at + BATCH] for name, leaf in data.items()}
        for at in range(0, BATCH * BATCHES, BATCH)
    ]
    done = fit(dp, tmp_path, source=batches, batch_size=None, **first)
    found = fit(dp, tmp_path, source=batches, batch_size=None, epochs=1)
    assert (found.steps, found.step) == (0, done.step)


def test_a_run_may_go_further_than_was_asked_for(dp: rx.DataParallel, tmp_path: Path) -> None:
    fit(dp, tmp_path / "run", epochs=1)
    found = fit(dp, tmp_path / "run")
    assert found.steps == STEPS - BATCHES
    check_same(found, whole(dp), tmp_path / "run")


def test_the_state_that_is_given_does_not_matter(dp: rx.DataParallel, tmp_path: Path) -> None:
    """The state of the checkpoint replaces it."""
    with crashing(7):
        fit(dp, tmp_path / "run")
    given = dp.init({name: array * 0 for name, array in model().items()}, seed=9)
    found = fit(dp, tmp_path / "run", state=given)
    assert bits(found.state) == bits(whole(dp).state)
    assert given.params["out"].is_deleted()


# Which run it is.


OVER_MODEL = [("hidden", PartitionSpec(None, "model")), ("out", PartitionSpec("model"))]
RULES = [("hidden", PartitionSpec(None, "data")), ("out", PartitionSpec("data"))]
EXACT = {"mode": "exact", "micro_shards": 8}
KINDS: dict[str, dict[str, Any]] = {
    "exact": {**EXACT, "devices": 2},
    "fsdp": {"layout": "fsdp", "devices": 2},
    "single": {"mode": "single"},
    "shard_map": {"mode": "shard_map"},
    "pmap": {"mode": "pmap"},
    "zero1": {"layout": "zero1"},
    "shard_map zero1": {"mode": "shard_map", "layout": "zero1"},
    "shard_map fsdp": {"mode": "shard_map", "layout": "fsdp"},
    "exact zero1": {**EXACT, "layout": "zero1"},
    "hybrid": {"layout": "fsdp", "axes": {"fsdp": 4}},
    "model": {"layout": rx.layout("fsdp", rules=OVER_MODEL), "axes": {"model": 2}},
    "rules": {"layout": RULES},
    "not donated": {"donate": False},
    "accumulated": {"accumulate": 2},
    "bfloat16": {"precision": "bfloat16"},
}


@pytest.mark.parametrize("kind", only(["exact", "fsdp"], KINDS))
def test_modes_and_layouts(tmp_path: Path, kind: str) -> None:
    settings = {"save_every": 6, "log_every": 2, **EVALUATED}
    resumed(data_parallel(**KINDS[kind]), tmp_path / "run", 7, **settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nnx", {"mode": "jit"}),
        exhaustive(("nnx", {"mode": "shard_map"})),
        exhaustive(("nnx", EXACT)),
        exhaustive(("cnn", {"mode": "jit"})),
        exhaustive(("cnn", {"layout": "fsdp"})),
        *(exhaustive((name, {})) for name in ("linen", "equinox", "gpt2", "weighted")),
    ],
)
def test_models_of_every_library(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Steps of nnx and cnn (BatchNorm, Dropout) depend on more than the parameters."""
    case = (cases.CASES | cases.DROPOUT_CASES)[name]
    dp = rx.DataParallel(case.loss, optax.adamw(0.01), **settings)
    assert name != "nnx" or dp.init(case.model()).extras
    arguments = {"source": case.source, "batch_size": 16, "model": case.model, "log_every": 2}
    resumed(dp, tmp_path / "run", 5, **arguments, eval_source=case.source)


def batches() -> list[dict[str, np.ndarray]]:
    """Return the batches of a loader; the last one is short."""
    starts = range(0, len(rows()["x"]), BATCH)
    return [{name: part[at : at + BATCH] for name, part in rows().items()} for at in starts]


def examples() -> list[dict[str, np.ndarray]]:
    return [dict(zip(rows(), row, strict=True)) for row in zip(*rows().values(), strict=True)]


LOADER = {"source": batches(), "batch_size": None, "eval_batch_size": BATCH, **EVALUATED}
SOURCES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "a loader": (LOADER, [5, 4, 8]),
    "Grain's dataset": ({"source": grain.MapDataset.source(examples()), "log_every": 2}, [4, 5]),
    "a process's rows": ({"source": rx.ProcessLocal(rows()), "log_every": 2}, [8]),
    "a process's loader": ({"source": rx.ProcessLocal(batches()), "log_every": 2}, [8]),
    "a generator": ({"source": lambda: iter(batches()), "epochs": 1}, [4]),
    "not shuffled": ({"shuffle": False}, [7]),
    "another seed": ({"seed": 5}, [7]),
    "one record": ({"log_every": 50}, [7]),
}
"""The settings of runs, and where they are cut: in `make test` at the first of these steps."""


@pytest.mark.parametrize(
    ("kind", "at"),
    only(
        [(kind, steps[0]) for kind, (_, steps) in SOURCES.items()],
        [(kind, at) for kind, (_, steps) in SOURCES.items() for at in steps],
    ),
)
def test_sources_and_orders_of_the_data(
    dp: rx.DataParallel, tmp_path: Path, kind: str, at: int
) -> None:
    save_every = 6 if at > 6 else 3  # in the middle of an epoch, a step or two before the cut
    resumed(dp, tmp_path / "run", at, save_every=save_every, **SOURCES[kind][0])


# What watches its steps.


def with_bad(*indices: int) -> dict[str, np.ndarray]:
    """Return rows, some of which are NaN."""
    source = rows()
    source["x"][list(indices)] = np.nan
    return source


def bad_steps(fit: rx.types.Fit) -> list[int]:
    return [record.step for record in fit.records if record.kind == "skip"]


@pytest.mark.parametrize("at", only([3], [1, 2, 3, 4, 5, 6, 7, 8, 12]))
def test_bad_steps_around_the_cut(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    source = with_bad(17, 33, 50)  # unshuffled: batches 2, 3 and 4 of each epoch
    found = resumed(dp, tmp_path / "run", at, source=source, shuffle=False, log_every=2)
    assert bad_steps(found) == [2, 3, 4, 7, 8, 9, 12, 13, 14]
    names = [record.examples for record in found.records if record.kind == "skip"]
    assert all(17 in examples for examples in names[::3] if examples)


def test_bad_steps_in_a_row_are_counted_on(dp: rx.DataParallel, tmp_path: Path) -> None:
    """Two before the cut and two after it make four."""
    source = with_bad(17, 33, 50, 66)
    settings = {"source": source, "shuffle": False, "max_bad_steps": 4}
    with crashing(3):
        fit(dp, tmp_path / "run", **settings)
    assert steps_saved(tmp_path / "run") == ["3"]
    with pytest.raises(rx.errors.DivergedError, match=r"4 steps in\b.*2 to 5"):
        fit(dp, tmp_path / "run", **settings)


def test_spikes_are_told_by_the_losses_before_the_cut(dp: rx.DataParallel, tmp_path: Path) -> None:
    """After 128 losses, over two starts, the one that is far above them is skipped."""
    source = rows(1280)
    source["y"][139 * 8 : 140 * 8] *= 1e4
    settings = {"source": source, "batch_size": 8, "skip_spikes": True, "shuffle": False}
    settings |= {"steps": 150, "save_every": 100, "log_every": 50}
    assert bad_steps(resumed(dp, tmp_path / "run", 139, **settings)) == [140]


@pytest.mark.parametrize("at", only([4], [4, 9]))
def test_noise_is_measured_at_the_same_steps(dp: rx.DataParallel, tmp_path: Path, at: int) -> None:
    found = resumed(dp, tmp_path / "run", at, noise=rx.hooks.NoiseMeter(2), log_every=7)
    assert sum(record.kind == "noise" for record in found.records) > 2


AUDITS = [(2, None, "stop"), (4, 7, "restore"), (2, None, "restore"), (4, 7, "stop")]


@pytest.mark.parametrize(("every", "log_every", "restore"), only(AUDITS[:2], AUDITS))
def test_audits(
    dp: rx.DataParallel, tmp_path: Path, every: int, log_every: int | None, restore: str
) -> None:
    audit = rx.hooks.Audit(every, restore)
    resumed(dp, tmp_path / "run", 8, audit=audit, log_every=log_every, save_every=6)
    assert audit.clean
