"""RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: what torchrun and many other launchers set."""

from collections.abc import Mapping

from replicax.cluster.address import join_address, whole_port
from replicax.cluster.engines.detected import Detected, said, whole_number
from replicax.errors import ConfigError

ENGINE = "RANK/WORLD_SIZE"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect(env: Mapping[str, str]) -> Detected | None:
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
        coordinator, reasons["coordinator"] = _coordinator(env)
    missing = [name for name in _NEEDED if name not in env]
    return Detected(
        ENGINE,
        process,
        processes,
        coordinator,
        job,
        local_process,
        local_processes,
        reasons,
        _lacks(env, missing),
    )


def is_torchrun(env: Mapping[str, str]) -> bool:
    """Whether torchrun itself started this process, and so is the innermost launcher."""
    return "TORCHELASTIC_RUN_ID" in env and "RANK" in env and "WORLD_SIZE" in env


def _coordinator(env: Mapping[str, str]) -> tuple[str, str]:
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


def _lacks(env: Mapping[str, str], missing: list[str]) -> dict[str, str]:
    if not missing:
        return {}
    there = ", ".join(said(env, name) for name in ("RANK", "WORLD_SIZE") if name in env)
    line = (
        f"{there} without {' and '.join(missing)}; {', '.join(_NEEDED)} go together: "
        f"set {' and '.join(missing)}"
    )
    return dict.fromkeys(("process", "processes", "coordinator"), line)
