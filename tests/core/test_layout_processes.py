"""Two processes of four devices each train with every layout as one device does."""

from typing import Any

import numpy as np
import pytest
from support.agreement import largest_difference, reference
from support.job_layouts import PARTS, TRAINED, flat
from support.processes import SUPPORT, run_job

pytestmark = pytest.mark.exhaustive
BOUND = 1e-6


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Results of a job that runs all cases."""
    path = tmp_path_factory.mktemp("job") / "results.npz"
    for ended in run_job(SUPPORT / "job_layouts.py", path, devices=4, timeout_seconds=900):
        assert ended.code == 0, ended.err
    return dict(np.load(path))


def part(results: dict[str, np.ndarray], name: str, of: str) -> dict[str, np.ndarray]:
    prefix = f"[{name!r}][{of!r}]"
    return {
        path.removeprefix(prefix): leaf for path, leaf in results.items() if path.startswith(prefix)
    }


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_as_one_device_does(name: str, results: dict[str, Any]) -> None:
    case, how = TRAINED[name]
    found, wanted = part(results, name, "trained"), flat(reference(case, how.alone).parts(*PARTS))
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        if path.startswith("['params']"):
            np.testing.assert_allclose(found[path], leaf, rtol=0, atol=BOUND, err_msg=path)
        else:
            assert largest_difference(found[path], leaf)[0] <= BOUND, path


@pytest.mark.parametrize("name", TRAINED)
def test_only_data_goes_between_processes(name: str, results: dict[str, Any]) -> None:
    _, how = TRAINED[name]
    inner = [axis for axis, size in how.axes if axis != "data" and size > 1]
    assert sorted(part(results, name, "inside").values()) == sorted(inner)
