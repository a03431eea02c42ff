"""Runs of islands, each in a thread: what is written, by whom, and what one that joins receives."""

import contextlib
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.island_networks import places
from support.island_runs import (
    BATCH,
    EPOCHS,
    SOURCE,
    STEPS,
    WEIGHTS,
    At,
    Island,
    squared,
    started,
    with_one_that_comes_back,
    with_one_that_dies,
)

import replicax as rx
from replicax.cluster.cluster_job import Lone
from replicax.cluster.place import find_place
from replicax.cluster.watchdog import Timeouts
from replicax.core import call_checks
from replicax.core.ground.job import PROCESS_JOB, Alone
from replicax.islands import founding, island_job
from replicax.islands.group import Group
from replicax.islands.island_job import IslandJob
from replicax.train.checkpoints.store import is_complete
from replicax.train.files.fingerprint import sha256
from replicax.train.files.records import CONFIG
from replicax.train.folder.changes import read_config, run_id


@pytest.fixture(scope="module")
def alone() -> rx.types.Fit:
    """Return the run of one device."""
    dp = rx.DataParallel(squared, optax.adam(0.05), mode="exact", mesh=rx.make_mesh(1))
    state = dp.init({"w": jnp.asarray(WEIGHTS)})
    options = {"batch_size": BATCH, "epochs": EPOCHS, "log_every": 5, "progress": False}
    return rx.fit(dp, state, SOURCE, eval_source=SOURCE, **options)


def metrics(records: list[rx.types.Fit] | Any) -> list[Any]:
    return [(r.kind, r.step, r.metrics) for r in records if r.kind in ("train", "eval")]


def written(folder: Path) -> list[Any]:
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    return [(r["kind"], r["step"], r["metrics"]) for r in lines if r["kind"] in ("train", "eval")]


def changes(folder: Path) -> list[tuple[int, int, int]]:
    lines = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    found = [line["metrics"] for line in lines if line["kind"] == "islands"]
    return [(int(m["live"]), int(m["joined"]), int(m["left"])) for m in found]


def delays(ended: list[Island]) -> list[float]:
    """Return the seconds that changes of the group have cost, as the writing island says."""
    found = [island.result.goodput for island in ended if island.result is not None]
    return [goodput.seconds["islands"] for goodput in found if goodput is not None]


@pytest.mark.promise("islands.death-costs-no-step")
@pytest.mark.parametrize("dying", [0, 1, 2])
def test_an_island_that_dies_changes_nothing(
    alone: rx.types.Fit, tmp_path: Path, dying: int
) -> None:
    settings: dict[str, Any] = {"eval_source": SOURCE, "run_dir": tmp_path / "run"}
    settings["saving"] = rx.Saving(every=7)
    islands: list[Island] = []

    def die() -> None:
        if dying == 0:  # it writes the folder
            (tmp_path / "run" / CONFIG).unlink()
        islands[dying].die()

    islands += started(3, {dying: [At(9, die)]}, **settings)
    ended = [island.join() for island in islands if island.place.index != dying]
    assert run_id(read_config(tmp_path / "run" / CONFIG)) is not None
    assert {island.bits() for island in ended} == {sha256(alone.state.params)}
    assert written(tmp_path / "run") == metrics(alone.records)
    assert changes(tmp_path / "run") == [(3, 3, 0), (2, 0, 1)]
    assert [island.result.step for island in ended] == [STEPS, STEPS]
    assert delays(ended)[0] > 0 or dying == 0  # the next writer's file begins after it


def test_the_end_of_a_run_is_saved_by_another_if_the_island_that_writes_dies(
    alone: rx.types.Fit, tmp_path: Path
) -> None:
    class DiesSaving(rx.Hook):
        def saving(self, run: Any) -> None:
            islands[0].die()

    islands: list[Island] = []
    islands += started(3, {0: [DiesSaving()]}, run_dir=tmp_path / "run")
    assert {island.join().bits() for island in islands[1:]} == {sha256(alone.state.params)}
    assert is_complete(tmp_path / "run", STEPS)


@pytest.mark.promise("islands.come-back")
@pytest.mark.parametrize("dying", [0, 2])
def test_an_island_that_comes_back_receives_the_run(
    alone: rx.types.Fit, tmp_path: Path, dying: int
) -> None:
    settings = {"eval_source": SOURCE, "run_dir": tmp_path / "run"}
    ended = with_one_that_comes_back(dying, 5, **settings)
    assert {island.bits() for island in ended} == {sha256(alone.state.params)}
    assert written(tmp_path / "run") == metrics(alone.records)
    assert changes(tmp_path / "run") == [(3, 3, 0), (2, 0, 1), (3, 1, 0)]
    assert metrics(ended[-1].result.records) == metrics(alone.records)


def test_an_island_that_comes_back_after_the_end_ends_too(
    alone: rx.types.Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founding, "FOUND_SECONDS", 1.0)
    settings = {"eval_source": SOURCE, "run_dir": tmp_path / "run"}
    islands = [island.join() for island in started(3, **settings)]
    assert delays(islands) == [0.0]
    late = Island(islands[1].place, **settings).join()
    assert {island.bits() for island in (*islands, late)} == {sha256(alone.state.params)}
    assert (late.result.step, late.result.steps) == (STEPS, 0)
    assert written(tmp_path / "run") == metrics(alone.records)
    told = [(tmp_path / "run", STEPS + 1), (tmp_path / "run", None), (tmp_path, STEPS)]
    assert not any(is_complete(*each) for each in told)


@pytest.mark.parametrize("goes_on", [True, False])
def test_without_checkpoints_half_of_the_islands_go_on_only_if_the_others_are_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr(Group, "_has_terminated", lambda self, index: goes_on)
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "saving": rx.Saving(minutes=None)}
    left, _ = [island.join() for island in with_one_that_dies(2, 1, 9, **settings)]
    assert isinstance(left.error, rx.errors.IslandLeftError) is not goes_on
    assert (left.result is not None) is goes_on


@pytest.mark.promise("islands.one-side-goes-on")
@pytest.mark.parametrize("dying", [0, 1])
def test_with_a_folder_for_each_only_the_island_that_writes_goes_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dying: int
) -> None:
    monkeypatch.setattr(Group, "_has_terminated", lambda self, index: False)
    islands: list[Island] = []
    for place in places(2):
        hooks = [At(9, lambda: islands[dying].die())] if place.index == dying else []
        islands.append(Island(place, hooks=hooks, run_dir=tmp_path / str(place.index)))
    left = islands[1 - dying].join()
    islands[dying].join()
    assert isinstance(left.error, rx.errors.IslandLeftError) is (dying == 0)
    assert (left.result is not None) is (dying == 1)


def batches(first: int) -> list[dict[str, np.ndarray]]:
    """Return batches of which only the last depends on `first`."""
    starts = [0, BATCH, BATCH * first]
    return [{name: rows[start:][:BATCH] for name, rows in SOURCE.items()} for start in starts]


DIFFERENCES: dict[str, list[dict[str, Any]]] = {
    "weights": [{"weights": WEIGHTS}, {"weights": WEIGHTS + 1}],
    "program": [{"mode": "jit"}, {"mode": "jit", "rate": 0.1}],
    "the batch": [{"source": batches(2)}, {"source": batches(3)}],
    "the batch, rounds": [
        {"source": batches(n), "rounds": rx.Rounds(every=3), "mode": "jit"} for n in (2, 3)
    ],
}


@pytest.mark.parametrize("differs", DIFFERENCES)
def test_islands_that_differ_are_refused(differs: str) -> None:
    pairs = zip(places(2), DIFFERENCES[differs], strict=True)
    islands = [Island(place, **settings) for place, settings in pairs]
    errors = [island.join().error for island in islands]
    assert any(isinstance(error, rx.errors.AgreementError) for error in errors)
    assert any(differs.removesuffix(", rounds") in str(error) for error in errors)
    assert all(island.result is None for island in islands)


def test_islands_in_other_environments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(env: Any) -> dict[str, str]:
        return {"XLA_FLAGS --fast": str(threading.get_ident())}

    monkeypatch.setattr(island_job, "compared_environment", environment)
    errors = [island.join().error for island in [Island(place) for place in places(2)]]
    assert any(isinstance(error, rx.errors.AgreementError) for error in errors)
    assert any("XLA_FLAGS --fast" in str(error) for error in errors)


class Flips(rx.Hook):
    """Changes a weight of this island before a step."""

    def before_step(self, run: Any, batch: Any) -> None:
        if run.place.step == 6:
            params = {"w": run.state.params["w"].at[0, 0].add(1e-6)}
            run.state = dataclasses.replace(run.state, params=params)


def test_parameters_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_checks, "_COMPARED_EVERY", 4)
    errors = [island.join().error for island in started(2, {1: [Flips()]})]
    assert all(isinstance(error, rx.errors.AgreementError) for error in errors)
    assert all("parameters is" in str(error) for error in errors)


@pytest.mark.promise("islands.other-modes")
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_in_other_modes_the_mean_is_that_of_one_device(alone: rx.types.Fit, mode: str) -> None:
    found = [island.join() for island in started(2, mode=mode)]
    assert len({island.bits() for island in found}) == 1
    wanted = np.asarray(alone.state.params["w"])
    np.testing.assert_allclose(np.asarray(found[0].result.state.params["w"]), wanted, atol=1e-5)


def test_an_iterator_of_batches_is_refused() -> None:
    where = places(1)[0]
    job = IslandJob(Lone(find_place({})), where, Group(where, Timeouts()))
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(job.finish)
        dp = rx.DataParallel(squared, optax.adam(0.05), mesh=rx.make_mesh(1), job=job)
        batches = iter([SOURCE])
        with pytest.raises(rx.errors.ConfigError, match="iterator"):
            rx.fit(dp, dp.init({"w": jnp.asarray(WEIGHTS)}), batches, steps=1, progress=False)


def test_an_island_without_its_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICAX_ISLANDS", "127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(rx.errors.ConfigError, match=r"2 islands .*rx\.initialize\(\)"):
        rx.DataParallel(squared, optax.adam(0.05))
    job = Alone()
    monkeypatch.setattr(PROCESS_JOB, "job", job)
    assert rx.DataParallel(squared, optax.adam(0.05)).job is job
