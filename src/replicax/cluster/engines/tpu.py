"""TPU pods: what GKE sets in the environment, or else what the TPU VM's metadata server says."""

from collections.abc import Callable, Mapping

from replicax.cluster.address import join_address
from replicax.cluster.engines import tpu_metadata
from replicax.cluster.engines.detected import Detected
from replicax.errors import ConfigError

ENGINE = "TPU"
COORDINATOR_PORT = 8482
"""JAX's port for the coordinator of a TPU pod."""
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


def detect(env: Mapping[str, str]) -> Detected | None:
    """The place in a TPU pod as the environment tells it, or `None` where it does not.

    Raises:
        ConfigError: TPU variables that are incomplete or contradict each other.
    """
    hosts_variable = next((name for name in _HOSTS if name in env), None)
    if hosts_variable is None:
        return None
    hosts = [_host(text) for text in env[hosts_variable].split(",") if text.strip()]
    if not hosts:
        raise ConfigError(f"{hosts_variable} is empty; it lists the pod's hosts: set or unset it")
    if "TPU_WORKER_ID" in env:
        worker = env["TPU_WORKER_ID"]
    elif len(hosts) == 1:
        worker = "0"
    else:
        raise ConfigError(
            f"{hosts_variable} lists {len(hosts)} hosts and TPU_WORKER_ID is not set; the two go "
            f"together: set TPU_WORKER_ID from 0 to {len(hosts) - 1}"
        )
    return _place(worker, "TPU_WORKER_ID", hosts, hosts_variable, env.get)


def detect_from_metadata(env: Mapping[str, str]) -> Detected | None:
    """The place as the metadata server tells it, or `None` where this is not a TPU VM in a pod.

    Raises:
        ConfigError: this is a TPU VM and its metadata server does not answer.
    """
    if "TPU_SKIP_MDS_QUERY" in env or not tpu_metadata.is_tpu_vm():
        return None
    worker = tpu_metadata.attribute(env, "agent-worker-number")
    endpoints = tpu_metadata.attribute(env, "worker-network-endpoints")
    if worker is None or endpoints is None:
        return None
    # Each is a host name, or in the older format a triple name:id:address.
    hosts = [endpoint.strip().split(":")[-1] for endpoint in endpoints.split(",")]
    variables = tpu_metadata.parse_tpu_env(tpu_metadata.attribute(env, "tpu-env") or "")
    return _place(
        worker,
        "agent-worker-number of the metadata server",
        hosts,
        "worker-network-endpoints of the metadata server",
        lambda name: env.get(name, variables.get(name)),
    )


def _place(
    worker_text: str,
    worker_name: str,
    hosts: list[str],
    hosts_name: str,
    value: Callable[[str], str | None],
) -> Detected:
    worker = _number(worker_text, worker_name)
    slices = _number(value("MEGASCALE_NUM_SLICES") or "1", "MEGASCALE_NUM_SLICES")
    this_slice = _number(value("MEGASCALE_SLICE_ID") or "0", "MEGASCALE_SLICE_ID")
    if worker >= len(hosts):
        raise ConfigError(
            f"{worker_name}={worker} and {hosts_name} lists {len(hosts)} hosts; hosts count "
            f"from 0 to {len(hosts) - 1}: correct one of them"
        )
    if this_slice >= slices:
        raise ConfigError(
            f"MEGASCALE_SLICE_ID={this_slice} with MEGASCALE_NUM_SLICES={slices}; slices count "
            f"from 0 to {slices - 1}: lower it"
        )
    several = "" if slices == 1 else ", MEGASCALE_SLICE_ID"
    reasons = {
        "process": f"{worker_name}={worker}{several}",
        "processes": hosts_name + ("" if slices == 1 else ", MEGASCALE_NUM_SLICES"),
    }
    first = value("MEGASCALE_COORDINATOR_ADDRESS")
    if slices > 1 and not first:
        raise ConfigError(
            f"MEGASCALE_NUM_SLICES={slices} without MEGASCALE_COORDINATOR_ADDRESS; processes of "
            "other slices cannot find process 0: set it to the first host of slice 0"
        )
    host = _host(first) if first else hosts[0]
    reasons["coordinator"] = (
        "MEGASCALE_COORDINATOR_ADDRESS" if first else f"first host of {hosts_name}"
    )
    return Detected(
        ENGINE,
        worker + this_slice * len(hosts),
        len(hosts) * slices,
        join_address(host, COORDINATOR_PORT),
        reasons=reasons,
    )


def _host(text: str) -> str:
    """`text` without its port."""
    text = text.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def _number(text: str, name: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={text!r} is not a whole number from 0; correct or unset it")
    return int(text)
