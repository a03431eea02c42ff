"""Precedence of variables, and errors of contradictions."""

import re

import pytest
from support.figures import assert_mentions

from replicax.cluster import tpu_pod
from replicax.cluster.place import Place, find_place
from replicax.cluster.wire import Hello, decode
from replicax.errors import ConfigError
from replicax.net.message import to_json

OWN = {
    "REPLICAX_PROCESS_ID": "1",
    "REPLICAX_PROCESSES": "4",
    "REPLICAX_COORDINATOR": "node017:29400",
}
STEP = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[017-018]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1544159233",
}


@pytest.fixture(autouse=True)
def _no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_pod, "is_tpu_vm", lambda: False)


NOTHING = "no launcher detected"


@pytest.mark.parametrize(
    "env",
    [{}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, {"MASTER_ADDR": "node1", "MASTER_PORT": "1"}],
)
def test_alone_where_nothing_tells(env: dict[str, str]) -> None:
    place = find_place(env)
    assert place == Place(0, 1, reasons=dict.fromkeys(["process", "processes"], NOTHING))
    assert re.fullmatch(r"process 0 of 1 \(no launcher\b.*\)", place.line())


def test_own_variables() -> None:
    place = find_place({**OWN, "REPLICAX_JOB_ID": "a b=c, d", "REPLICAX_LOCAL_DEVICES": "2,3"})
    assert (place.process, place.processes, place.coordinator) == (1, 4, "node017:29400")
    assert (place.job, place.local_devices, place.engine) == ("a b=c, d", (2, 3), "REPLICAX_*")
    assert_mentions(
        place.line(),
        "process 1 of 4 (REPLICAX_PROCESS_ID, REPLICAX_PROCESSES)",
        "coordinator node017:29400 (REPLICAX_COORDINATOR)",
        "b=c, d (REPLICAX_JOB_ID)",
        "local devices 2,3 (REPLICAX_LOCAL_DEVICES)",
    )
    beside_engines = {**OWN, **STEP, **TORCH, "SLURM_PROCID": "x", "RANK": "y"}
    assert find_place(beside_engines).engine == "REPLICAX_*"


def test_a_job_id_that_is_no_text_can_be_sent() -> None:
    place = find_place({**OWN, "REPLICAX_JOB_ID": "n\udce4me"})
    hello = Hello(place.job, 1, 4, host="n\udce4me")
    back = decode(to_json(hello))
    assert isinstance(back, Hello)
    assert (back.job, back.host) == (place.job, "n?me")


def test_arguments_win_over_variables() -> None:
    place = find_place(
        {**OWN, "REPLICAX_JOB_ID": "theirs", "REPLICAX_LOCAL_DEVICES": "2"},
        coordinator="[::1]:2000",
        processes=9,
        process=8,
        job="mine",
        local_devices=[0],
    )
    assert (place.process, place.processes, place.coordinator) == (8, 9, "[::1]:2000")
    assert (place.job, place.local_devices, place.engine) == ("mine", (0,), "arguments")
    assert place.reasons["process"] == "argument process=8"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"REPLICAX_PROCESS_ID": "4"},
            "REPLICAX_PROCESS_ID=4 with REPLICAX_PROCESSES=4; ranks range from 0 to 3",
        ),
        ({"REPLICAX_PROCESS_ID": "-1"}, "REPLICAX_PROCESS_ID='-1' is not an integer of at least 0"),
        ({"REPLICAX_PROCESS_ID": "²"}, "REPLICAX_PROCESS_ID='²' is not an integer"),
        ({"REPLICAX_PROCESSES": "0"}, "REPLICAX_PROCESSES='0' is not an integer of at least 1"),
        ({"REPLICAX_PROCESSES": ""}, "REPLICAX_PROCESSES='' is not an integer"),
        ({"REPLICAX_PROCESSES": "4.0"}, "REPLICAX_PROCESSES='4.0' is not"),
        ({"REPLICAX_COORDINATOR": ""}, "REPLICAX_COORDINATOR='' is not host:port"),
        ({"REPLICAX_COORDINATOR": ":99"}, "REPLICAX_COORDINATOR=':99' is not host:port"),
        ({"REPLICAX_COORDINATOR": "node017"}, "REPLICAX_COORDINATOR='node017' is not host:port"),
        ({"REPLICAX_COORDINATOR": "http://a:9"}, "is not host:port"),
        ({"REPLICAX_COORDINATOR": "a:0"}, "REPLICAX_COORDINATOR=a:0 has the port '0'"),
        ({"REPLICAX_COORDINATOR": "a:65536"}, "has the port '65536'"),
        ({"REPLICAX_COORDINATOR": "::1:900"}, r"without brackets.*\[host\]:port"),
        ({"REPLICAX_LOCAL_DEVICES": "0,0"}, "REPLICAX_LOCAL_DEVICES='0,0' is not a list"),
        ({"REPLICAX_LOCAL_DEVICES": "0,x"}, "REPLICAX_LOCAL_DEVICES='0,x' is not a list"),
        ({"REPLICAX_LOCAL_DEVICES": ""}, "REPLICAX_LOCAL_DEVICES='' is not a list"),
    ],
)
def test_a_bad_value_is_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_place({**OWN, **changed})
    assert "\n" not in str(caught.value)


def test_two_engines_that_agree_fill_each_others_gaps() -> None:
    place = find_place({**STEP, **TORCH})
    assert (place.engine, place.coordinator) == ("RANK/WORLD_SIZE", "10.0.0.7:29500")
    assert (place.job, place.local_process, place.local_processes) == ("123.0", 1, 2)
    without_address = {"RANK": "3", "WORLD_SIZE": "4"}
    place = find_place({**STEP, **without_address})
    assert place.coordinator == find_place(STEP).coordinator


def test_two_engines_that_disagree_are_both_named() -> None:
    with pytest.raises(ConfigError, match=r"RANK=0 of WORLD_SIZE=4.*SLURM_PROCID=3 of SLURM_STEP"):
        find_place({**STEP, **TORCH, "RANK": "0"})
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8.*OMPI_COMM_WORLD_SIZE=2.*disagree"):
        find_place({**MPIRUN, **TORCH, "WORLD_SIZE": "8"})


def test_torchrun_inside_a_step_or_mpirun_is_the_innermost() -> None:
    torchrun = {**TORCH, "RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "a"}
    for outer in (STEP, MPIRUN):
        place = find_place({**outer, **torchrun})
        assert (place.process, place.processes, place.engine) == (5, 8, "RANK/WORLD_SIZE")


def test_mpirun_inside_an_allocation_or_a_step() -> None:
    one = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    one = {**STEP, **one, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node017"}
    for outer in ({"SLURM_JOB_ID": "123"}, STEP, one):
        place = find_place({**outer, **MPIRUN})
        assert (place.process, place.processes, place.engine) == (1, 2, "Open MPI")


def test_srun_inside_mpirun() -> None:
    place = find_place({**STEP, **MPIRUN, "PMIX_NAMESPACE": "slurm.pmix.123.0"})
    assert (place.process, place.processes, place.engine) == (3, 4, "Slurm")
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert find_place({**STEP, **one}).engine == "Slurm"


def test_variables_left_for_torch_do_not_hide_slurm() -> None:
    left = {"WORLD_SIZE": "4", "MASTER_ADDR": "node017", "MASTER_PORT": "29500"}
    assert find_place({**STEP, **left}).engine == "Slurm"


def test_one_process_by_an_engine_and_several_by_own_variables() -> None:
    own = {name: OWN[name] for name in ("REPLICAX_PROCESSES", "REPLICAX_COORDINATOR")}
    with pytest.raises(ConfigError, match="without REPLICAX_PROCESS_ID"):
        find_place({"SLURM_JOB_ID": "123", **own})
