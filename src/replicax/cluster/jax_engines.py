"""Engines that JAX detects and `engines.py` does not: MPI by mpi4py, and those of plugins."""

import os
from collections.abc import Mapping

from replicax.cluster.variables import CLUSTER, Detected, Fact
from replicax.core.ground import jax_internals  # the classes have no public name
from replicax.errors import ClusterError, ConfigError, choose

DETECTED_HERE = frozenset(
    f"{name}Cluster" for name in ("Ompi", "Slurm", "BaseTpu", "GceTpu", "GkeTpu", "K8s")
)
"""JAX's classes for the engines that have a detector in `engines.py`."""
_TIMEOUT_SECONDS = 300


def detect_by_jax(env: Mapping[str, str]) -> Detected | None:
    """Return the place by the method that REPLICAX_CLUSTER names, or by any that is present.

    Methods that JAX only uses on request, such as mpi4py, have to be named.

    Raises:
        ConfigError: the named method does not exist, or does not work here.
        ClusterError: JAX fails to read the place.
    """
    types = jax_internals.cluster_types()
    if CLUSTER in env:
        method = choose(CLUSTER, env[CLUSTER], {each.name: each for each in types if each.name})
        if not method.is_env_present():
            raise ConfigError(
                f"{CLUSTER}={env[CLUSTER]} and JAX does not detect that engine in this process; "
                "start it by that engine, or unset the variable"
            )
    else:
        asked = (each for each in types if each.__name__ not in DETECTED_HERE)
        present = (each for each in asked if not each.opt_in_only_method and each.is_env_present())
        first = next(present, None)
        if first is None:
            return None
        method = first
    reason = f"JAX's {method.__name__}"
    try:
        facts = {
            "process": Fact(method.get_process_id(), reason),
            "processes": Fact(method.get_process_count(), reason),
        }
        if facts["processes"].value > 1:
            address = method.get_coordinator_address(
                timeout_secs=_TIMEOUT_SECONDS,
                override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
            )
            facts["coordinator"] = Fact(address, reason)
        if (local := method.get_local_process_id()) is not None:
            facts["local_process"] = Fact(local, reason)
    except Exception as error:  # whatever a plugin raises
        raise ClusterError(
            f"{reason} is present and cannot tell this process's place "
            f"({type(error).__name__}: {error}); repair it, or set REPLICAX_PROCESS_ID, "
            "REPLICAX_PROCESSES and REPLICAX_COORDINATOR"
        ) from error
    return Detected(method.name or method.__name__, facts)
