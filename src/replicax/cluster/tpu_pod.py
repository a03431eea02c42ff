"""TPU pods: read GKE's environment variables, or the TPU VM's metadata server."""

import contextlib
import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from replicax.cluster.variables import Detected, Fact, whole_number
from replicax.core.ground import jax_internals  # JAX's table of TPUs has no public name
from replicax.errors import ConfigError
from replicax.net.address import join_address

TPU_ENGINE = "TPU"
COORDINATOR_PORT = 8482
"""JAX's port for the coordinator of a TPU pod."""
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_TIMEOUT_SECONDS = 3.0
"""The server is on the host itself and answers within milliseconds."""


def detect_tpu_pod(env: Mapping[str, str]) -> Detected | None:
    """Read the place in a TPU pod from environment variables; `None` without them."""
    name = next((name for name in _HOSTS if name in env), None)
    if name is None:
        return None
    hosts = [_host(text) for text in env[name].split(",") if text.strip()]
    if not hosts:
        raise ConfigError(f"{name} is empty; it must list the pod's hosts: set or unset it")
    if len(hosts) > 1 and "TPU_WORKER_ID" not in env:
        raise ConfigError(
            f"{name} lists {len(hosts)} hosts but TPU_WORKER_ID is not set; both are "
            f"needed: set TPU_WORKER_ID from 0 to {len(hosts) - 1}"
        )
    return _place(env.get("TPU_WORKER_ID", "0"), "TPU_WORKER_ID", hosts, name, env)


def detect_from_metadata(env: Mapping[str, str]) -> Detected | None:
    """Read the place from the metadata server; `None` if this is not a TPU VM in a pod."""
    if "TPU_SKIP_MDS_QUERY" in env or not is_tpu_vm():
        return None
    worker = _attribute(env, "agent-worker-number")
    endpoints = _attribute(env, "worker-network-endpoints")
    if worker is None or endpoints is None:
        return None
    # Each is a host name, or name:id:address in the older format.
    hosts = [endpoint.strip().split(":")[-1] for endpoint in endpoints.split(",")]
    # The lines of tpu-env are NAME: 'value'.
    lines = re.findall(r"^\s*(\w+)\s*:\s*(.*?)\s*$", _attribute(env, "tpu-env") or "", re.MULTILINE)
    settings = {name: value.strip("'\"") for name, value in lines} | dict(env)
    server = "of the metadata server"
    names = (f"agent-worker-number {server}", f"worker-network-endpoints {server}")
    return _place(worker, names[0], hosts, names[1], settings)


def _place(
    worker_text: str, worker_name: str, hosts: list[str], hosts_name: str, env: Mapping[str, str]
) -> Detected:
    """Return the place of one of a slice's `hosts`."""
    worker = whole_number(worker_text, worker_name)
    slices = whole_number(env.get("MEGASCALE_NUM_SLICES") or "1", "MEGASCALE_NUM_SLICES", least=1)
    this_slice = whole_number(env.get("MEGASCALE_SLICE_ID") or "0", "MEGASCALE_SLICE_ID")
    first = env.get("MEGASCALE_COORDINATOR_ADDRESS")
    if worker >= len(hosts):
        raise ConfigError(
            f"{worker_name}={worker} and {hosts_name} lists {len(hosts)} hosts; worker IDs "
            f"range from 0 to {len(hosts) - 1}: correct one of them"
        )
    if this_slice >= slices:
        raise ConfigError(
            f"MEGASCALE_SLICE_ID={this_slice} with MEGASCALE_NUM_SLICES={slices}; slice IDs "
            f"range from 0 to {slices - 1}: lower it"
        )
    if slices > 1 and not first:
        raise ConfigError(
            f"MEGASCALE_NUM_SLICES={slices} without MEGASCALE_COORDINATOR_ADDRESS; processes of "
            "other slices cannot find process 0: set it to the first host of slice 0"
        )
    of_slices = ("", "") if slices == 1 else (", MEGASCALE_SLICE_ID", ", MEGASCALE_NUM_SLICES")
    coordinator = join_address(_host(first) if first else hosts[0], COORDINATOR_PORT)
    told_by = "MEGASCALE_COORDINATOR_ADDRESS" if first else f"first host of {hosts_name}"
    return Detected(
        TPU_ENGINE,
        {
            "process": Fact(
                worker + this_slice * len(hosts), f"{worker_name}={worker}{of_slices[0]}"
            ),
            "processes": Fact(len(hosts) * slices, f"{hosts_name}{of_slices[1]}"),
            "coordinator": Fact(coordinator, told_by),
        },
    )


def _host(text: str) -> str:
    """Return `text` without its port."""
    text = text.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def is_tpu_vm() -> bool:
    """Return whether JAX finds TPU chips attached to this host."""
    with contextlib.suppress(OSError):  # hot-unplugged between listing and reading
        return bool(jax_internals.tpu_chips()[0])
    return False


def _attribute(env: Mapping[str, str], key: str) -> str | None:
    """Return one attribute of this instance, or `None` if the server does not have it."""
    server = env.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # The server is never behind a proxy, whatever http_proxy says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
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
