"""The launchers of processes, and which one numbers this process, read from the environment."""

import re
import socket
from collections.abc import Mapping
from dataclasses import replace

from replicax.cluster import slurm_step, tpu_pod
from replicax.cluster.address import join_address, whole_port
from replicax.cluster.detected import Detected, derived_port, said, whole_number
from replicax.cluster.variables import COORDINATOR, PROCESS_ID, PROCESSES
from replicax.errors import ConfigError

TORCH = "RANK/WORLD_SIZE"
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = "Open MPI"
_RANK = "OMPI_COMM_WORLD_RANK"
_SIZE = "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
KUBERNETES = "Kubernetes"
POD_PORT = 29400
"""Where process 0 listens in its own pod, which no other job shares."""
_INDEX = "JOB_COMPLETION_INDEX"


def find_innermost(env: Mapping[str, str]) -> Detected | None:
    """The engine that started this very process, or `None` where there is no engine.

    torchrun is always the innermost. An engine with one process only holds another's launcher.
    Engines that agree are one, and fill each other's gaps.

    Raises:
        ConfigError: two engines number this process differently, or one's variables are wrong.
    """
    if _is_torchrun(env):
        return _detect_torch(env)
    found = [place for detect in _DETECTORS if (place := detect(env)) is not None]
    several = [place for place in found if place.is_one_of_several]
    if not several:
        on_tpu = tpu_pod.detect_from_metadata(env)
        if on_tpu is not None:
            found.insert(0, on_tpu)
        complete = [place for place in found if place.is_complete]
        # WORLD_SIZE=1 beside a Slurm step of one says nothing that is missing.
        candidates = complete or found
        return candidates[0] if candidates else None
    inner = several[0]
    for outer in several[1:]:
        if _started_inside_mpirun(env, inner, outer):
            inner = outer
        elif (inner.process, inner.processes) == (outer.process, outer.processes):
            inner = _filled(inner, outer)
        elif (inner.engine, outer.engine) not in _MAY_DIFFER:
            raise ConfigError(
                f"{inner.numbering} ({inner.engine}) and {outer.numbering} ({outer.engine}) "
                f"disagree; one launcher numbers the processes: unset one pair, or set "
                f"{PROCESS_ID}, {PROCESSES} and {COORDINATOR}"
            )
    return inner


def _started_inside_mpirun(env: Mapping[str, str], inner: Detected, outer: Detected) -> bool:
    """Whether srun ran inside mpirun, not around it: then its PMIx has named the job anew."""
    return (inner.engine, outer.engine) == (
        OPEN_MPI,
        slurm_step.ENGINE,
    ) and env.get("PMIX_NAMESPACE", "").startswith("slurm.")


def _filled(inner: Detected, outer: Detected) -> Detected:
    """`inner` with what only `outer` knows."""
    fields = ("coordinator", "job", "local_process", "local_processes")
    gaps = [
        name
        for name in fields
        if getattr(inner, name) in (None, "") and getattr(outer, name) not in (None, "")
    ]
    return replace(
        inner,
        **{name: getattr(outer, name) for name in gaps},
        reasons={**inner.reasons, **{name: outer.reasons[name] for name in gaps}},
    )


# RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: what torchrun and many other launchers set.


def _detect_torch(env: Mapping[str, str]) -> Detected | None:
    """The place that RANK and WORLD_SIZE give, or `None` where neither is set.

    torchrun keeps its own store listening on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True), so
    there the coordinator takes MASTER_PORT + 1. Any other launcher leaves MASTER_PORT to process 0.

    Raises:
        ConfigError: a value that is not a number.
    """
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    process = whole_number(env, "RANK") if "RANK" in env else None
    processes = whole_number(env, "WORLD_SIZE", least=1) if "WORLD_SIZE" in env else None
    reasons = {
        field: said(env, name)
        for field, name in (("process", "RANK"), ("processes", "WORLD_SIZE"))
        if name in env
    }
    local_process = whole_number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else None
    local_processes = (
        whole_number(env, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in env else None
    )
    reasons |= {"local_process": "LOCAL_RANK", "local_processes": "LOCAL_WORLD_SIZE"}
    job = env.get("TORCHELASTIC_RUN_ID", "")
    if job == "none":  # torchrun's word for a run that nobody named
        job = ""
    if job:
        reasons["job"] = "TORCHELASTIC_RUN_ID"
    coordinator = None
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        coordinator, reasons["coordinator"] = _torch_coordinator(env)
    missing = [name for name in _TORCH_NAMES if name not in env]
    return Detected(
        TORCH,
        process,
        processes,
        coordinator,
        job,
        local_process,
        local_processes,
        reasons,
        _torch_lacks(env, missing),
    )


def _is_torchrun(env: Mapping[str, str]) -> bool:
    """Whether torchrun itself started this process, and so is the innermost launcher."""
    return "TORCHELASTIC_RUN_ID" in env and "RANK" in env and "WORLD_SIZE" in env


def _torch_coordinator(env: Mapping[str, str]) -> tuple[str, str]:
    host = env["MASTER_ADDR"].strip().strip("[]")
    if not host:
        raise ConfigError(
            f"MASTER_ADDR={env['MASTER_ADDR']!r} names no host; it is the host of process 0: set it"
        )
    port = whole_port(env["MASTER_PORT"].strip(), "MASTER_PORT")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return join_address(host, port), "MASTER_ADDR, MASTER_PORT"
    beside = port + 1 if port < 65535 else port - 1
    return join_address(host, beside), "MASTER_ADDR, beside torchrun's own MASTER_PORT"


def _torch_lacks(env: Mapping[str, str], missing: list[str]) -> dict[str, str]:
    if not missing:
        return {}
    there = ", ".join(said(env, name) for name in ("RANK", "WORLD_SIZE") if name in env)
    line = (
        f"{there} without {' and '.join(missing)}; {', '.join(_TORCH_NAMES)} go together: "
        f"set {' and '.join(missing)}"
    )
    return dict.fromkeys(("process", "processes", "coordinator"), line)


# Open MPI 4 and 5: processes that mpirun started.


def _detect_open_mpi(env: Mapping[str, str]) -> Detected | None:
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
    coordinator, reason = _open_mpi_coordinator(env, process, local_processes == processes, job)
    if coordinator is None:
        lacks["coordinator"] = reason
    else:
        reasons["coordinator"] = reason
    return Detected(
        OPEN_MPI,
        process,
        processes,
        coordinator,
        job,
        local_process,
        local_processes,
        reasons,
        lacks,
    )


def _open_mpi_coordinator(
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


# Kubernetes: the pods of an indexed Job, or of a JobSet with one.


def _detect_kubernetes(env: Mapping[str, str]) -> Detected | None:
    """The place in an indexed Job, or `None` in any other pod and outside Kubernetes.

    Kubernetes gives the index. The number of pods comes from REPLICAX_PROCESSES or WORLD_SIZE, the
    coordinator from REPLICAX_COORDINATOR, MASTER_ADDR, or this pod's own name if it has a domain.

    Raises:
        ConfigError: a value that is not a number.
    """
    if _INDEX not in env or "KUBERNETES_SERVICE_HOST" not in env:
        return None
    process, reasons = whole_number(env, _INDEX), {"process": said(env, _INDEX)}
    processes, lacks = None, {}
    if "WORLD_SIZE" in env:
        processes = whole_number(env, "WORLD_SIZE", least=1)
        reasons["processes"] = said(env, "WORLD_SIZE")
        # Pods that each train alone still have an index.
        process = process if processes > 1 else 0
    else:
        lacks["processes"] = (
            f"{_INDEX}={process} without {PROCESSES}; pods cannot see how many they are: add it to "
            f"the pod's env with the Job's completions as its value, or 1 to train alone"
        )
    # The pods of an indexed Job are named after it: JOB-INDEX.
    name, suffix = socket.gethostname().partition(".")[0], f"-{env[_INDEX].strip()}"
    job = name.removesuffix(suffix) if name.endswith(suffix) else ""
    if job:
        reasons["job"] = f"the pod's name {name}"
    coordinator = None
    if "MASTER_ADDR" in env:
        port = whole_port(env.get("MASTER_PORT", str(POD_PORT)), "MASTER_PORT")
        coordinator = join_address(env["MASTER_ADDR"].strip("[] "), port)
        reasons["coordinator"] = "MASTER_ADDR" + (", MASTER_PORT" if "MASTER_PORT" in env else "")
    elif COORDINATOR not in env:
        # Asks the name service, which may be slow: only where nothing else tells.
        domain = socket.getfqdn().partition(".")[2]
        if job and domain:
            coordinator = join_address(f"{job}-0.{domain}", POD_PORT)
            reasons["coordinator"] = f"index 0 in the pod's name {name}"
    if coordinator is None:
        lacks["coordinator"] = (
            f"{_INDEX}={env[_INDEX]} without {COORDINATOR}, and the pod {name} has no domain; "
            f"add a headless Service and spec.template.spec.subdomain, or {COORDINATOR}=HOST:PORT "
            "to the pod's env"
        )
    return Detected(KUBERNETES, process, processes, coordinator, job, reasons=reasons, lacks=lacks)


# From the innermost launcher outwards, where two agree.
_DETECTORS = (
    _detect_torch,
    tpu_pod.detect,
    _detect_open_mpi,
    slurm_step.detect,
    _detect_kubernetes,
)
# Inner and outer: two that may differ, since the outer only starts the inner's own helpers
# (mpirun's daemons are a Slurm step), or numbers a part (one slice of TPUs is one indexed Job).
_MAY_DIFFER = {
    (OPEN_MPI, slurm_step.ENGINE),
    (tpu_pod.ENGINE, KUBERNETES),
}
