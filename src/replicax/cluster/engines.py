"""Detect the launcher that assigned this process's rank from environment variables."""

import re
import socket
from collections.abc import Mapping
from dataclasses import replace

from replicax.cluster import slurm_step, tpu_pod
from replicax.cluster.jax_engines import detect_by_jax
from replicax.cluster.variables import (
    CLUSTER,
    COORDINATOR,
    PROCESS_ID,
    PROCESSES,
    Detected,
    Fact,
    set_integers,
)
from replicax.errors import ConfigError
from replicax.net.address import derived_port, join_address, split_address, whole_port

TORCH = "RANK/WORLD_SIZE"
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = "Open MPI"
_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
KUBERNETES = "Kubernetes"
POD_PORT = 29400
"""Port of process 0 in its own pod, which no other job shares."""
_INDEX = "JOB_COMPLETION_INDEX"


def find_innermost(env: Mapping[str, str]) -> Detected | None:
    """Return the engine that started this process itself, or `None` without an engine.

    torchrun is always the innermost. An engine with one process only runs another's launcher.
    Engines that agree are merged, and fill each other's gaps. JAX is asked for engines that have no
    detector here.
    """
    if CLUSTER in env:
        return detect_by_jax(env)
    if {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= env.keys():
        return _detect_torch(env)
    detected = [place for detect in _DETECTORS if (place := detect(env)) is not None]
    complete = [place for place in detected if None not in place.numbers]
    several = [place for place in complete if place.numbers[1] != 1]
    if not several:
        # WORLD_SIZE=1 inside a one-process Slurm step adds no information.
        elsewhere = tpu_pod.detect_from_metadata(env) or detect_by_jax(env)
        return elsewhere or next(iter(complete or detected), None)
    inner = several[0]
    for outer in several[1:]:
        engines = inner.engine, outer.engine
        # If srun ran inside mpirun, its PMIx renamed the job.
        is_slurms = env.get("PMIX_NAMESPACE", "").startswith("slurm.")
        if is_slurms and engines == (OPEN_MPI, slurm_step.SLURM_ENGINE):
            inner = outer
        elif inner.numbers == outer.numbers:
            inner = replace(inner, facts={**outer.facts, **inner.facts})
        elif engines not in _MAY_DIFFER:
            raise ConfigError(
                f"{inner.numbering} ({inner.engine}) and {outer.numbering} ({outer.engine}) "
                f"disagree; ranks must come from one launcher: unset one pair, or set "
                f"{PROCESS_ID}, {PROCESSES} and {COORDINATOR}"
            )
    return inner


def _master(env: Mapping[str, str], port: int = 0) -> Fact:
    """Return MASTER_ADDR with MASTER_PORT, or with `port` if that is not set."""
    host = env["MASTER_ADDR"].strip(" []")
    if not host:
        raise ConfigError(
            f"MASTER_ADDR={env['MASTER_ADDR']!r} has no host; set it to the host of process 0"
        )
    if "MASTER_PORT" not in env:
        return Fact(join_address(host, port), "MASTER_ADDR")
    text = env["MASTER_PORT"].strip()
    port = whole_port(text, "MASTER_PORT", text)
    return Fact(join_address(host, port), "MASTER_ADDR, MASTER_PORT")


def _detect_torch(env: Mapping[str, str]) -> Detected | None:
    """Read RANK and WORLD_SIZE, as set by torchrun and many other launchers.

    torchrun's own store listens on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True), so the
    coordinator gets the next port. Any other launcher leaves MASTER_PORT to process 0.
    """
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    facts = set_integers(
        env,
        process="RANK",
        processes="WORLD_SIZE",
        local_process="LOCAL_RANK",
        local_processes="LOCAL_WORLD_SIZE",
    )
    job = env.get("TORCHELASTIC_RUN_ID")
    if job and job != "none":  # torchrun's placeholder for an unnamed run
        facts["job"] = Fact(job, "TORCHELASTIC_RUN_ID")
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        facts["coordinator"] = _master(env)
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host, port = split_address(facts["coordinator"].value)
            beside = port + 1 if port < 65535 else port - 1
            facts["coordinator"] = Fact(
                join_address(host, beside), "MASTER_ADDR, next to torchrun's own MASTER_PORT"
            )
    missing = " and ".join(name for name in _TORCH_NAMES if name not in env)
    there = ", ".join(f"{name}={env[name]}" for name in _TORCH_NAMES[:2] if name in env)
    line = f"{there} without {missing}; {', '.join(_TORCH_NAMES)} must all be set: set {missing}"
    return Detected(TORCH, facts, dict.fromkeys(("process", "processes", "coordinator"), line))


def _detect_open_mpi(env: Mapping[str, str]) -> Detected | None:
    """Read the variables of mpirun (Open MPI 4 or 5); `None` if it did not start this process."""
    missing = [name for name in (_RANK, _SIZE) if name not in env]
    if len(missing) == 1:
        there = _SIZE if missing == [_RANK] else _RANK
        raise ConfigError(f"{there} is set but {missing[0]} is not; mpirun sets both: use mpirun")
    if missing:
        return None
    facts = set_integers(
        env,
        process=_RANK,
        processes=_SIZE,
        local_process=_LOCAL_RANK,
        local_processes=_LOCAL_SIZE,
    )
    job_variable = next((name for name in _JOB if name in env), None)
    if job_variable:
        facts["job"] = Fact(env[job_variable], job_variable)
    port = derived_port(env[job_variable] if job_variable else "")
    host = _host_of_mpirun(env.get(_MPIRUN, ""))
    # Process 0 listens, so mpirun's host is usable only if process 0 runs on it.
    is_elsewhere = env.get(_DAEMON, env.get(_MPIRUN)) != env.get(_MPIRUN)
    if "local_processes" in facts and facts["local_processes"].value == facts["processes"].value:
        reason = f"one host: {_LOCAL_SIZE} is {_SIZE}"
        facts["coordinator"] = Fact(join_address("127.0.0.1", port), reason)
    elif env.get("MASTER_ADDR"):
        facts["coordinator"] = _master(env, port)
    elif host and not (is_elsewhere and facts["process"].value == 0):
        facts["coordinator"] = Fact(join_address(host, port), f"host of mpirun in {_MPIRUN}")
    line = (
        f"{_SIZE}={env[_SIZE]} on several hosts, and Open MPI does not give the host of process "
        f"0; set it: mpirun -x MASTER_ADDR=HOST ..., or -x {COORDINATOR}=HOST:PORT"
    )
    return Detected(OPEN_MPI, facts, {"coordinator": line})


def _host_of_mpirun(uri: str) -> str | None:
    """Return the first usable address of a URI.

    `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911;tcp6://[fe80::1]:4`: JAX takes the first one.
    """
    hosts: list[str] = []
    for match in re.finditer(r"tcp6?://(?:\[([^\]]*)\]|([^:;]*)):\d+", uri):
        hosts += (match[1] or match[2] or "").split(",")
    usable = [host for host in hosts if host and not host.startswith(("127.", "fe80:", "::1"))]
    return next((host for host in usable if ":" not in host), usable[0] if usable else None)


def _detect_kubernetes(env: Mapping[str, str]) -> Detected | None:
    """Read the variables of an indexed Job; `None` in other pods and outside Kubernetes.

    Kubernetes sets the index. The number of pods comes from REPLICAX_PROCESSES or WORLD_SIZE, the
    coordinator from REPLICAX_COORDINATOR, MASTER_ADDR, or this pod's own name if it has a domain.
    JAX queries the cluster's API instead, for which a pod needs a package and a permission.
    """
    if _INDEX not in env or "KUBERNETES_SERVICE_HOST" not in env:
        return None
    facts = set_integers(env, process=_INDEX, processes="WORLD_SIZE")
    index = facts["process"]
    if "processes" in facts and facts["processes"].value == 1:
        facts["process"] = Fact(0, index.reason)  # pods that train alone also have an index
    # The pods of an indexed Job are named after it: JOB-INDEX.
    name, suffix = socket.gethostname().partition(".")[0], f"-{env[_INDEX].strip()}"
    job = name.removesuffix(suffix) if name.endswith(suffix) else ""
    if job:
        facts["job"] = Fact(job, f"the pod's name {name}")
    if env.get("MASTER_ADDR"):
        facts["coordinator"] = _master(env, POD_PORT)
    elif COORDINATOR not in env:
        # A DNS lookup, which may be slow: the last resort.
        domain = socket.getfqdn().partition(".")[2]
        if job and domain:
            address = join_address(f"{job}-0.{domain}", POD_PORT)
            facts["coordinator"] = Fact(address, f"index 0 in the pod's name {name}")
    lacks = {
        "processes": f"{index.reason} without {PROCESSES}; a pod cannot see how many pods exist: "
        "add it to the pod's env, set to the Job's completions, or to 1 to train alone",
        "coordinator": f"{index.reason} without {COORDINATOR}, and the pod {name} has no domain; "
        f"add a headless Service and spec.template.spec.subdomain, or {COORDINATOR}=HOST:PORT "
        "to the pod's env",
    }
    return Detected(KUBERNETES, facts, lacks)


# From the innermost launcher outwards.
_DETECTORS = (
    _detect_torch,
    tpu_pod.detect_tpu_pod,
    _detect_open_mpi,
    slurm_step.detect_slurm_step,
    _detect_kubernetes,
)
# Pairs (inner, outer) that may differ: the outer only starts the inner's own helpers (mpirun's
# daemons are a Slurm step), or numbers only a part (one TPU slice is one indexed Job).
_MAY_DIFFER = {
    (OPEN_MPI, slurm_step.SLURM_ENGINE),
    (tpu_pod.TPU_ENGINE, KUBERNETES),
}
