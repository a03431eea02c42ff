"""Engines that JAX detects and Replicax does not: a plugin's, and mpi4py."""

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from replicax.cluster import tpu_pod
from replicax.cluster.jax_engines import DETECTED_HERE
from replicax.cluster.place import find_place
from replicax.core.ground import jax_internals
from replicax.errors import ClusterError, ConfigError

STEP = {
    "SLURM_JOB_ID": "4108",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "node1",
}


@pytest.fixture(autouse=True)
def _this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_pod, "is_tpu_vm", lambda: False)


@pytest.fixture
def plugin() -> Iterator[Any]:
    """A class as a plugin registers it with JAX, by defining it; process 1 of 2 on its host."""
    base = jax_internals.ClusterEnv
    before = list(base._cluster_types)

    class HarborCluster(base):
        name = "harbor"
        size = 6

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None, override_coordinator_port: str | None
        ) -> str:
            return f"pier-0:{override_coordinator_port or 8476}"

        @classmethod
        def get_process_count(cls) -> int:
            return cls.size

        @classmethod
        def get_process_id(cls) -> int:
            return 5 if cls.size > 1 else 0

        @classmethod
        def get_local_process_id(cls) -> int | None:
            return 1

    yield HarborCluster
    base._cluster_types[:] = before


def test_the_place_is_that_of_jax(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = find_place({})
    assert (place.process, place.processes, place.engine) == (5, 6, "harbor")
    assert (place.coordinator, place.local_process) == ("pier-0:8476", 1)
    assert place.local_devices is None
    assert "(JAX's HarborCluster)" in place.line()
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "9000")
    assert find_place({}).coordinator == "pier-0:9000"


def test_a_job_of_one_has_no_coordinator(plugin: Any) -> None:
    plugin.size = 1
    place = find_place({})
    assert (place.process, place.processes, place.coordinator) == (0, 1, None)


def test_what_is_told_or_detected_here_comes_first(plugin: Any) -> None:
    several = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert find_place(several).engine == "Slurm"
    assert find_place(STEP).engine == "harbor"  # a step of one task started its launcher
    told = {"REPLICAX_PROCESS_ID": "0", "REPLICAX_PROCESSES": "2", "REPLICAX_COORDINATOR": "a:1"}
    assert find_place(told).processes == 2
    assert find_place({**STEP, "REPLICAX_CLUSTER": "harbor"}).engine == "harbor"


def test_a_plugin_that_fails_is_named(plugin: Any) -> None:
    plugin.get_process_count = classmethod(lambda cls: {}["HARBOR_SIZE"])
    with pytest.raises(ClusterError, match=r"HarborCluster.*KeyError.*HARBOR_SIZE"):
        find_place({})


def test_mpi4py_is_asked_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        def Get_rank(self) -> int:  # noqa: N802
            return 0

        def Get_size(self) -> int:  # noqa: N802
            return 3

        def bcast(self, value: str, root: int) -> str:
            assert root == 0
            return value

        def Split_type(self, kind: str) -> "World":  # noqa: N802
            return self

    module = types.ModuleType("mpi4py")
    module.__spec__ = importlib.machinery.ModuleSpec("mpi4py", None)
    module.MPI = types.SimpleNamespace(COMM_WORLD=World(), COMM_TYPE_SHARED="")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    assert find_place({}).processes == 1  # it is installed on many machines
    place = find_place({"REPLICAX_CLUSTER": "mpi4py"})
    assert (place.process, place.processes, place.engine) == (0, 3, "mpi4py")
    assert place.coordinator is not None


@pytest.mark.parametrize(
    ("name", "words"), [("mpi4pi", ["'mpi4pi'", "'mpi4py'", "slurm"]), ("slurm", ["slurm"])]
)
def test_a_method_that_cannot_be_is_refused(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError) as caught:
        find_place({"REPLICAX_CLUSTER": name})
    assert [word for word in [*words, "REPLICAX_CLUSTER"] if word not in str(caught.value)] == []


def test_the_engines_that_jax_detects_by_itself_have_a_detector_here() -> None:
    """A new JAX with another class would ask it; one that renames a class, ask twice."""
    own = [each for each in jax_internals.cluster_types() if not each.opt_in_only_method]
    assert {each.__name__ for each in own} == DETECTED_HERE
