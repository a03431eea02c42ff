"""TPU pods: what GKE sets in the environment, or else what the TPU VM's metadata server says."""

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from replicax.cluster.address import join_address
from replicax.cluster.detected import Detected
from replicax.errors import ConfigError

ENGINE = "TPU"
COORDINATOR_PORT = 8482
"""JAX's port for the coordinator of a TPU pod."""
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")

TIMEOUT_SECONDS = 3.0
"""The server is on the host itself and answers within milliseconds."""
_GOOGLE = "0x1ae0"
# As in jax._src.hardware_utils: v3, plc, v4, v5p, v5e, v6e, 7x. The vendor alone would not do:
# every virtual machine of Google has a network card of its own make.
_TPU_DEVICES = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


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
    if "TPU_SKIP_MDS_QUERY" in env or not is_tpu_vm():
        return None
    worker = attribute(env, "agent-worker-number")
    endpoints = attribute(env, "worker-network-endpoints")
    if worker is None or endpoints is None:
        return None
    # Each is a host name, or in the older format a triple name:id:address.
    hosts = [endpoint.strip().split(":")[-1] for endpoint in endpoints.split(",")]
    variables = parse_tpu_env(attribute(env, "tpu-env") or "")
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
    slices = _number(value("MEGASCALE_NUM_SLICES") or "1", "MEGASCALE_NUM_SLICES", least=1)
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


def _number(text: str, name: str, least: int = 0) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ConfigError(
            f"{name}={text!r} is not a whole number from {least}; correct or unset it"
        )
    return int(text)


def is_tpu_vm(root: Path = Path("/")) -> bool:
    """Whether TPU chips are attached to this host."""
    if any(root.glob("dev/accel[0-9]*")):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        try:
            device = vendor.with_name("device").read_text().strip()
            if vendor.read_text().strip() == _GOOGLE and device in _TPU_DEVICES:
                return True
        except OSError:
            continue  # hot-unplugged between listing and reading
    return False


def attribute(env: Mapping[str, str], key: str) -> str | None:
    """One attribute of this instance, or `None` where the server has none of that name.

    Args:
        env: the environment; GCE_METADATA_IP is the server's address where it is not the usual.
        key: as in `agent-worker-number`.

    Raises:
        ConfigError: the server did not answer.
    """
    server = env.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # The server is never behind a proxy, whatever http_proxy says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
        cause = f"HTTP {error.code}"
    except (OSError, http.client.HTTPException) as error:
        cause = str(getattr(error, "reason", error))
    raise ConfigError(
        f"a TPU is attached and its metadata server {url} did not answer ({cause}); set "
        "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, or TPU_SKIP_MDS_QUERY=1 to use this host alone"
    )


def parse_tpu_env(text: str) -> dict[str, str]:
    """The lines `NAME: 'value'` of the attribute tpu-env."""
    pairs = re.findall(r"^\s*(\w+)\s*:\s*(.*?)\s*$", text, re.MULTILINE)
    return {name: value.strip("'\"") for name, value in pairs}
