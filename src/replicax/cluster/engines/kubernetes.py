"""Kubernetes: the pods of an indexed Job, or of a JobSet with one."""

import socket
from collections.abc import Mapping

from replicax.cluster.address import join_address, whole_port
from replicax.cluster.engines.detected import Detected, said, whole_number
from replicax.cluster.variables import COORDINATOR, PROCESSES

ENGINE = "Kubernetes"
DEFAULT_PORT = 29400
"""Where process 0 listens in its own pod, which no other job shares."""
_INDEX = "JOB_COMPLETION_INDEX"


def detect(env: Mapping[str, str]) -> Detected | None:
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
        port = whole_port(env.get("MASTER_PORT", str(DEFAULT_PORT)), "MASTER_PORT")
        coordinator = join_address(env["MASTER_ADDR"].strip("[] "), port)
        reasons["coordinator"] = "MASTER_ADDR" + (", MASTER_PORT" if "MASTER_PORT" in env else "")
    elif COORDINATOR not in env:
        # Asks the name service, which may be slow: only where nothing else tells.
        domain = socket.getfqdn().partition(".")[2]
        if job and domain:
            coordinator = join_address(f"{job}-0.{domain}", DEFAULT_PORT)
            reasons["coordinator"] = f"index 0 in the pod's name {name}"
    if coordinator is None:
        lacks["coordinator"] = (
            f"{_INDEX}={env[_INDEX]} without {COORDINATOR}, and the pod {name} has no domain; "
            f"add a headless Service and spec.template.spec.subdomain, or {COORDINATOR}=HOST:PORT "
            "to the pod's env"
        )
    return Detected(ENGINE, process, processes, coordinator, job, reasons=reasons, lacks=lacks)
