"""Open MPI 4 and 5: processes that mpirun started."""

import re
from collections.abc import Mapping

from replicax.cluster.address import join_address, whole_port
from replicax.cluster.engines.detected import Detected, derived_port, said, whole_number
from replicax.cluster.variables import COORDINATOR
from replicax.errors import ConfigError

ENGINE = "Open MPI"
_RANK = "OMPI_COMM_WORLD_RANK"
_SIZE = "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"


def detect(env: Mapping[str, str]) -> Detected | None:
    """The place that mpirun gave, or `None` where no mpirun started this process.

    Raises:
        ConfigError: a variable of Open MPI that is not a number, or one of the pair missing.
    """
    present = [name for name in (_RANK, _SIZE) if name in env]
    if not present:
        return None
    if len(present) == 1:
        missing = _SIZE if present[0] == _RANK else _RANK
        raise ConfigError(f"{present[0]} is set and {missing} is not; mpirun sets both: use it")
    process, processes = whole_number(env, _RANK), whole_number(env, _SIZE, least=1)
    local_process = whole_number(env, _LOCAL_RANK) if _LOCAL_RANK in env else None
    local_processes = whole_number(env, _LOCAL_SIZE, least=1) if _LOCAL_SIZE in env else None
    job_variable = next((name for name in _JOB if name in env), None)
    job = env[job_variable] if job_variable else ""
    reasons = {
        "process": said(env, _RANK),
        "processes": said(env, _SIZE),
        "local_process": _LOCAL_RANK,
        "local_processes": _LOCAL_SIZE,
    }
    lacks: dict[str, str] = {}
    if job_variable:
        reasons["job"] = job_variable
    coordinator, reason = _coordinator(env, process, local_processes == processes, job)
    if coordinator is None:
        lacks["coordinator"] = reason
    else:
        reasons["coordinator"] = reason
    return Detected(
        ENGINE,
        process,
        processes,
        coordinator,
        job,
        local_process,
        local_processes,
        reasons,
        lacks,
    )


def _coordinator(
    env: Mapping[str, str], process: int, is_one_host: bool, job: str
) -> tuple[str | None, str]:
    """The address and what decided it; or `None` and what is missing."""
    if is_one_host:
        reason = f"one host: {_LOCAL_SIZE} is {_SIZE}"
        return join_address("127.0.0.1", derived_port(job)), reason
    if "MASTER_ADDR" in env:
        port_text = env.get("MASTER_PORT")
        port = derived_port(job) if port_text is None else whole_port(port_text, "MASTER_PORT")
        names = "MASTER_ADDR" if port_text is None else "MASTER_ADDR, MASTER_PORT"
        return join_address(env["MASTER_ADDR"].strip("[] "), port), names
    host = _host_of_mpirun(env.get(_MPIRUN, ""))
    # Process 0 listens, so the host of mpirun serves only where process 0 is on it.
    is_elsewhere = process == 0 and env.get(_DAEMON, env.get(_MPIRUN)) != env.get(_MPIRUN)
    if host and not is_elsewhere:
        return join_address(host, derived_port(job)), f"host of mpirun in {_MPIRUN}"
    return None, (
        f"{_SIZE}={env[_SIZE]} on several hosts, and Open MPI does not say where process 0 is; "
        f"name its host: mpirun -x MASTER_ADDR=HOST ..., or -x {COORDINATOR}=HOST:PORT"
    )


def _host_of_mpirun(uri: str) -> str | None:
    """First usable address of `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911;tcp6://[fe80::1]:4`."""
    found: list[str] = []
    for match in re.finditer(r"tcp6?://(?:\[([^\]]*)\]|([^:;]*)):\d+", uri):
        found += (match[1] or match[2] or "").split(",")
    usable = [host for host in found if host and not host.startswith(("127.", "fe80:", "::1"))]
    return next((host for host in usable if ":" not in host), usable[0] if usable else None)
