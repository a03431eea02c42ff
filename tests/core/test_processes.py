"""Two processes compute what one device does: modes, layouts, sources, uneven data."""

import functools
import json
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
import pytest
from support.counted_metrics import by_the_book
from support.job_cases import (
    CASES,
    DATA,
    MORE,
    Rows,
    custom_step,
    joined_batches,
    predict,
    train,
    train_network,
)
from support.processes import SUPPORT, run_job
from support.tiers import exhaustive, only

import replicax as rx

Results = Callable[[str], dict[str, Any]]
JOB = SUPPORT / "job_cases.py"


FEW = ("shard_map", "exact", "fsdp", "uneven loaders", "own arrays")
JOBS = {
    "2x1": (1, (*FEW, *MORE)),
    "2x1, others": (1, tuple(name for name in CASES if name not in FEW)),
    "2x2": (2, (*CASES, *MORE)),
}
"""Devices of each of two processes, and their cases."""
in_small_and_large_jobs = pytest.mark.parametrize("job", only(["2x1"], ["2x1", "2x2"]))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of a job, which runs when they are first needed."""

    @functools.cache
    def run(job: str) -> dict[str, Any]:
        devices, names = JOBS[job]
        path = tmp_path_factory.mktemp("job") / "results.json"
        for ended in run_job(JOB, path, *names, devices=devices):
            assert ended.code == 0, ended.err
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    return run


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    """Results of mode `single` on one device, for each source."""
    one = {"mode": "single", "mesh": rx.make_mesh(devices=jax.devices()[:1])}

    return {
        "arrays": train(DATA, **one),
        "grain": train(grain.MapDataset.source(Rows()), **one),
        "uneven": train(joined_batches(), **one),
        "own arrays": train(_own_arrays_joined(), **one),
    }


def _own_arrays_joined() -> list[dict[str, np.ndarray]]:
    return [{name: leaf[index] for name, leaf in DATA.items()} for index in _own_indices()]


def _own_indices() -> list[np.ndarray]:
    """Process 0's rows 0 to 34 and process 1's 35 to 50, eight of each in a batch."""
    batches = []
    for number in range(5):
        first = np.arange(8 * number, min(8 * number + 8, 35))
        second = np.arange(35 + 8 * number, min(35 + 8 * number + 8, 51))
        batches.append(np.concatenate([first, second]))
    return batches


@pytest.mark.promise("parity.processes")
@pytest.mark.parametrize(
    ("job", "name"),
    [
        (job, name) if job == "2x1" else exhaustive((job, name))
        for job, (_, names) in JOBS.items()
        for name in names
        if name in CASES
    ],
)
def test_processes_compute_what_one_device_does(
    job: str, name: str, results: Results, expected: dict[str, Any]
) -> None:
    source = "grain" if name == "grain" else "own arrays" if name == "own arrays" else "arrays"
    wanted, got = expected["uneven" if "uneven" in name else source], results(job)[name]
    assert got["rows"] == wanted["rows"]
    assert got["evaluated"]["rows"] == wanted["evaluated"]["rows"]
    for part in ("weights", "last", "evaluated"):
        for key, value in wanted[part].items():
            np.testing.assert_allclose(got[part][key], value, rtol=2e-6, atol=1e-6, err_msg=key)


@pytest.mark.promise("exact.any-processes")
@in_small_and_large_jobs
def test_exact_gives_the_bits_of_one_device(job: str, results: Results) -> None:
    one = train(DATA, mode="exact", mesh=rx.make_mesh(devices=jax.devices()[:1]))
    assert results(job)["exact"] == one


@in_small_and_large_jobs
def test_a_network_with_random_keys_is_trained_alike(job: str, results: Results) -> None:
    assert results(job)["network"] == train_network(rx.make_mesh(devices=jax.devices()[:1]))


@in_small_and_large_jobs
def test_every_process_has_all_predictions(job: str, results: Results) -> None:
    """The job checks that all processes have the same."""
    one, found = predict(rx.make_mesh(devices=jax.devices()[:1])), results(job)["predictions"]
    for name, leaf in one["arrays"].items():
        np.testing.assert_allclose(found["arrays"][name], leaf, rtol=1e-5, atol=1e-6)
        own = np.asarray(leaf)[np.concatenate(_own_indices())]
        np.testing.assert_allclose(found["own arrays"][name], own, rtol=1e-5, atol=1e-6)


@in_small_and_large_jobs
def test_metrics_that_are_no_means_are_those_of_all_rows(job: str, results: Results) -> None:
    """Each process reads them, without the others."""
    for found in results(job)["merged"].values():
        for name, value in by_the_book().items():
            np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)


@in_small_and_large_jobs
def test_a_custom_step_is_that_of_one_device(job: str, results: Results) -> None:
    one, found = custom_step(rx.make_mesh(devices=jax.devices()[:1])), results(job)["custom step"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6),
        found,
        json.loads(json.dumps(one)),
    )


@in_small_and_large_jobs
def test_arrays_of_each_process_have_a_known_length(job: str, results: Results) -> None:
    told = results(job)["own arrays"]["told"]
    assert told == {"rows": 51, "padding": 16 - 3}  # 35 and 16: five batches, the last of 3 rows


@in_small_and_large_jobs
def test_shard_map_reduces_one_vector(job: str, results: Results) -> None:
    # The gradient and its divisor, and total and weight of the loss and the metric.
    numbers = 6 * 16 + 16 + 1 + 2 * 2
    (shape,) = results(job)["reductions"]
    assert shape.startswith(f"f32[{numbers}]")


@pytest.mark.promise("outside.rows-of-one-process")
def test_rows_of_one_process_are_no_batch_of_all() -> None:
    """Arrays that JAX has joined are accepted."""
    calls, mean = ("step", "evaluate", "predict"), float(np.mean(np.arange(32.0) ** 2))
    wanted = [f"own {call} True True" for call in calls]
    wanted += [f"{name} {call} {mean}" for name in ("all", "joined") for call in calls]
    wanted += [f"feed step {mean}"]
    for process, ended in enumerate(run_job(SUPPORT / "job_own_rows.py")):
        assert ended.code == 0, ended.err
        lines = [line for line in ended.out.splitlines() if "[Gloo]" not in line]
        rows = " ".join(str(row) for row in range(process, 32, 2))
        more = [f"index {rows}", "same job True", "set of rows an rx.ExtraRows of 3 rows"]
        assert lines == [*wanted, *more]
