"""Two processes compute what one device does: modes, layouts, sources, uneven data."""

import json
from typing import Any

import grain
import jax
import numpy as np
import pytest
from support.job_cases import CASES, DATA, Rows, joined_batches, train, train_network
from support.processes import SUPPORT, run_job

import replicax as rx

pytestmark = pytest.mark.slow
JOB = SUPPORT / "job_cases.py"


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["2x1", "2x2"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of the job's cases on two processes with one or two devices each."""
    processes, devices = request.param
    path = tmp_path_factory.mktemp("job") / "results.json"
    for ended in run_job(JOB, path, processes=processes, devices=devices):
        assert ended.code == 0, ended.err
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    """Of mode `single` on one device, for each source."""
    one = {"mode": "single", "mesh": rx.make_mesh(devices=jax.devices()[:1])}

    return {
        "arrays": train(DATA, **one),
        "grain": train(grain.MapDataset.source(Rows()), **one),
        "uneven": train(joined_batches(), **one),
        "own arrays": train(_own_arrays_joined(), **one),
    }


def _own_arrays_joined() -> list[dict[str, np.ndarray]]:
    """Process 0's rows 0 to 34 and process 1's 35 to 50, eight of each in a batch."""
    batches = []
    for number in range(5):
        first = np.arange(8 * number, min(8 * number + 8, 35))
        second = np.arange(35 + 8 * number, min(35 + 8 * number + 8, 51))
        index = np.concatenate([first, second])
        batches.append({name: leaf[index] for name, leaf in DATA.items()})
    return batches


@pytest.mark.parametrize("name", CASES)
def test_processes_compute_what_one_device_does(
    name: str, results: dict[str, Any], expected: dict[str, Any]
) -> None:
    source = "grain" if name == "grain" else "own arrays" if name == "own arrays" else "arrays"
    wanted, got = expected["uneven" if "uneven" in name else source], results[name]
    assert got["rows"] == wanted["rows"]
    assert got["evaluated"]["rows"] == wanted["evaluated"]["rows"]
    for part in ("weights", "last", "evaluated"):
        for key, value in wanted[part].items():
            np.testing.assert_allclose(got[part][key], value, rtol=2e-6, atol=1e-6, err_msg=key)


def test_exact_gives_the_bits_of_one_device(results: dict[str, Any]) -> None:
    one = train(DATA, mode="exact", mesh=rx.make_mesh(devices=jax.devices()[:1]))
    assert results["exact"] == one


def test_a_network_with_random_keys_is_trained_alike(results: dict[str, Any]) -> None:
    assert results["network"] == train_network(rx.make_mesh(devices=jax.devices()[:1]))


def test_arrays_of_each_process_have_a_known_length(results: dict[str, Any]) -> None:
    told = results["own arrays"]["told"]
    assert told == {"rows": 51, "padding": 16 - 3}  # 35 and 16: five batches, the last of 3 rows


def test_shard_map_reduces_one_vector(results: dict[str, Any]) -> None:
    numbers = 6 * 16 + 16 + 2 * 2  # the gradient, and total and weight of the loss and the metric
    (shape,) = results["reductions"]
    assert shape.startswith(f"f32[{numbers}]")
