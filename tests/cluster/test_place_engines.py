"""The variables that each engine really sets, and their traps."""

import re
import socket

import pytest
from support.figures import assert_mentions

from replicax.cluster import tpu_pod
from replicax.cluster.place import find_place
from replicax.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "4108",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NODELIST": "node[017-019],gpu[1,5]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x3)",
    "SLURM_NODEID": "4",
    "SLURM_LOCALID": "0",
}
# Open MPI 4.1.4, two hosts.
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1090060289",
    "PMIX_NAMESPACE": "1090060289",
    "OMPI_MCA_orte_hnp_uri": "1090060288.0;tcp://192.0.2.2:37589;tcp6://[fd00::2]:57603",
    "OMPI_MCA_orte_local_daemon_uri": "1090060288.1;tcp://192.0.2.3:41111",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "2"}
TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}


def _name_this_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda host="": name)
    monkeypatch.setattr(socket, "gethostname", lambda: name.partition(".")[0])


@pytest.fixture(autouse=True)
def _this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_pod, "is_tpu_vm", lambda: False)
    _name_this_host(monkeypatch, "here")


def test_slurm_step() -> None:
    place = find_place(STEP)
    assert (place.process, place.processes, place.engine) == (6, 7, "Slurm")
    assert (place.local_process, place.local_processes) == (0, 1)
    assert_mentions(
        place.line(),
        "process 6 of 7 (SLURM_PROCID, SLURM_STEP_NUM_TASKS)",
        "; coordinator node017:61452 (first host",
        "of SLURM_STEP_NODELIST)",
        "; job 4108.0 (SLURM_JOB_ID, SLURM_STEP_ID)",
    )
    ports = {find_place({**STEP, "SLURM_STEP_ID": str(i)}).coordinator for i in range(50)}
    assert len(ports) == 50


def test_slurm_step_of_one_process() -> None:
    one = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    place = find_place({**STEP, **one, "SLURM_STEP_NODELIST": "node017", "SLURM_NODEID": "0"})
    assert place.line() == "process 0 of 1 (SLURM_PROCID, SLURM_STEP_NUM_TASKS)"


def test_slurm_step_that_tells_less() -> None:
    def without(*names: str) -> dict[str, str]:
        return {name: value for name, value in STEP.items() if name not in names}

    assert find_place(without("SLURM_NODEID")).local_processes is None
    assert find_place(without("SLURM_STEP_TASKS_PER_NODE")).local_processes is None
    assert find_place(without("SLURM_LOCALID")).local_process is None
    one_host = {"SLURM_STEP_NODELIST": "node017", "SLURM_STEP_TASKS_PER_NODE": "7"}
    place = find_place({**without("SLURM_NODEID"), **one_host})
    assert (place.local_processes, place.coordinator) == (7, "127.0.0.1:61452")
    older = {**without("SLURM_STEP_ID"), "SLURM_STEPID": "3"}
    assert find_place(older).job == "4108.3"
    assert find_place(without("SLURM_STEP_ID")).job == "4108.0"


@pytest.mark.parametrize(
    "step",
    [{}, {"SLURM_STEP_ID": str(2**32 - 6), "SLURM_STEP_NUM_TASKS": "7"}],
    ids=["batch script", "shell of salloc"],
)
def test_slurm_without_srun_is_alone_and_says_so(step: dict[str, str]) -> None:
    batch = {"SLURM_JOB_ID": "4108", "SLURM_NTASKS": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    place = find_place({**batch, "SLURM_STEP_NODELIST": "node017", **step})
    assert (place.processes, place.coordinator, place.engine) == (1, None, "Slurm")
    assert re.fullmatch(
        r"process 0 of 1 \(.*Slurm allocation .*not started\b.*srun\)", place.line()
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID=7 with SLURM_STEP_NUM_TASKS=7; .* from 0 to 6"),
        ({"SLURM_PROCID": "six"}, "SLURM_PROCID='six' is not an integer of at least 0:"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, r"is 7 processes on 5 hosts, SLURM_STEP_NUM_TASKS=8"),
        ({"SLURM_STEP_NODELIST": "node017"}, "7 processes on 5 hosts.* has 1 hosts"),
        ({"SLURM_STEP_NODELIST": "node[3-1]"}, r"SLURM_STEP_NODELIST='node\[3-1\]' is not a list"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x"}, "SLURM_STEP_TASKS_PER_NODE='2x' is not a list"),
        ({"SLURM_NODEID": "5"}, "SLURM_NODEID=5 and .* has 5 hosts"),
        (
            {"SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_TASKS": "9"},
            "SLURM_STEP_NUM_TASKS=9 processes of this heterogeneous step.*set REPLICAX_COORDINATOR",
        ),
    ],
)
def test_slurm_contradictions(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place({**STEP, **changed})


def test_heterogeneous_slurm_steps() -> None:
    # The step may be in one component only; then its variables are those of the whole.
    assert find_place({**STEP, "SLURM_HET_SIZE": "2"}).coordinator == "node017:61452"
    across = {"SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_TASKS": "9", "SLURM_PROCID": "8"}
    place = find_place({**STEP, **across, "REPLICAX_COORDINATOR": "node017:1"})
    assert (place.process, place.processes, place.local_processes) == (8, 9, None)


def test_mpirun_version_5_on_one_host() -> None:
    version_5 = {name: value for name, value in MPIRUN.items() if "MCA" not in name}
    place = find_place(
        {**version_5, "PMIX_NAMESPACE": "prterun-node017-2143@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    )
    assert place.job == "prterun-node017-2143@1"
    assert (place.process, place.local_process, place.local_processes) == (3, 1, 4)
    assert str(place.coordinator).startswith("127.0.0.1:")
    other = find_place(
        {**version_5, "PMIX_NAMESPACE": "prterun-node017-2144@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    )
    assert place.coordinator != other.coordinator


def test_mpirun_on_several_hosts() -> None:
    coordinator = find_place(MPIRUN).coordinator
    assert coordinator is not None
    assert coordinator.startswith("192.0.2.2:")
    named = find_place({**MPIRUN, "MASTER_ADDR": "node017", "MASTER_PORT": "700"})
    assert named.coordinator == "node017:700"
    assert named.reasons["coordinator"] == "MASTER_ADDR, MASTER_PORT"
    derived = find_place({**MPIRUN, "MASTER_ADDR": "node017"})
    assert derived.coordinator is not None
    assert 61440 <= int(derived.coordinator.removeprefix("node017:")) <= 65535
    assert derived.reasons["coordinator"] == "MASTER_ADDR"


def test_mpirun_whose_address_is_only_ipv6() -> None:
    uri = "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d:c083::2]:43370"
    coordinator = find_place({**MPIRUN, "OMPI_MCA_orte_hnp_uri": uri}).coordinator
    assert coordinator is not None
    assert coordinator.startswith("[2620:10d:c083::2]:")


def test_mpirun_that_does_not_say_where_process_0_is() -> None:
    no_uri = {name: value for name, value in MPIRUN.items() if "uri" not in name}
    fix = r"OMPI_COMM_WORLD_SIZE=4 on several hosts.*mpirun -x MASTER_ADDR=HOST"
    with pytest.raises(ConfigError, match=fix):
        find_place(no_uri)
    # mpirun on a login node: process 0 is under another daemon.
    with pytest.raises(ConfigError, match=fix):
        find_place({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"})
    assert find_place({**no_uri, "REPLICAX_COORDINATOR": "a:1"}).coordinator == "a:1"


def test_mpirun_with_half_of_its_variables() -> None:
    with pytest.raises(
        ConfigError, match=r"OMPI_COMM_WORLD_RANK is set\b.*OMPI_COMM_WORLD_SIZE is not"
    ):
        find_place({"OMPI_COMM_WORLD_RANK": "0"})


def test_kubernetes_coordinator_from_the_pods_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _name_this_host(monkeypatch, "big-run-2.pods.ns.svc.cluster.local")
    place = find_place({**POD, "WORLD_SIZE": "3"})
    assert place.coordinator == "big-run-0.pods.ns.svc.cluster.local:29400"
    assert place.job == "big-run"
    assert re.fullmatch(r"index 0 .*pod's name big-run-2", place.reasons["coordinator"])
    _name_this_host(monkeypatch, "a-deployment.pods.local")
    with pytest.raises(ConfigError, match="without REPLICAX_COORDINATOR"):
        find_place({**POD, "WORLD_SIZE": "3"})


def test_kubernetes_with_an_address_for_torch() -> None:
    address = {"WORLD_SIZE": "3", "MASTER_ADDR": "a.b"}
    assert find_place({**POD, **address}).reasons["coordinator"] == "MASTER_ADDR"
    assert find_place({**POD, **address}).coordinator == "a.b:29400"
    assert find_place({**POD, **address, "MASTER_PORT": "700"}).coordinator == "a.b:700"


def test_kubernetes_asks_no_name_service_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda host="": pytest.fail("asked"))
    own = {"REPLICAX_PROCESSES": "4", "REPLICAX_COORDINATOR": "a:1"}
    place = find_place({**POD, **own})
    assert (place.process, place.processes, place.coordinator) == (2, 4, "a:1")


def test_kubernetes_pod_told_to_train_alone() -> None:
    for name in ("WORLD_SIZE", "REPLICAX_PROCESSES"):
        place = find_place({**POD, name: "1"})
        assert (place.process, place.processes) == (0, 1)


def test_kubernetes_says_what_the_manifest_lacks() -> None:
    with pytest.raises(ConfigError, match=r"without REPLICAX_PROCESSES; .*Job's completions"):
        find_place(POD)
    with pytest.raises(ConfigError, match=r"without REPLICAX_COORDINATOR, .*pod here\b.*no domain"):
        find_place({**POD, "REPLICAX_PROCESSES": "4"})
    with pytest.raises(ConfigError, match="JOB_COMPLETION_INDEX=2 with REPLICAX_PROCESSES=2"):
        find_place({**POD, "REPLICAX_PROCESSES": "2", "REPLICAX_COORDINATOR": "a:1"})


def test_torchrun_keeps_its_port() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "r7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = find_place({**TORCH, **torchrun})
    assert (place.coordinator, place.job) == ("[::1]:29501", "r7")
    place = find_place({**TORCH, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert (place.coordinator, place.local_process) == ("[::1]:29500", 0)
    assert place.local_processes == 2
    assert find_place({**TORCH, **torchrun, "MASTER_PORT": "65535"}).coordinator == "[::1]:65534"
    assert find_place({**TORCH, **torchrun, "TORCHELASTIC_RUN_ID": "none"}).job == ""


@pytest.mark.parametrize("missing", list(TORCH))
def test_rank_and_the_rest_go_together(missing: str) -> None:
    env = {name: value for name, value in TORCH.items() if name != missing}
    with pytest.raises(ConfigError, match=f"without {missing};.*set {missing}"):
        find_place(env)


def test_one_process_of_several_is_not_alone() -> None:
    with pytest.raises(ConfigError, match=r"RANK=3 with WORLD_SIZE=1; .*from 0 to 0"):
        find_place({**TORCH, "RANK": "3", "WORLD_SIZE": "1"})


def test_bad_addresses_for_torch() -> None:
    for name, value in (("MASTER_PORT", "70000"), ("MASTER_PORT", "x"), ("MASTER_ADDR", "")):
        with pytest.raises(ConfigError, match=f"{name}="):
            find_place({**TORCH, name: value})
