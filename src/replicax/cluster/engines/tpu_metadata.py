"""The metadata server of a TPU VM; asked only where TPU hardware is attached."""

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from replicax.errors import ConfigError

TIMEOUT_SECONDS = 3.0
"""The server is on the host itself and answers within milliseconds."""
_GOOGLE = "0x1ae0"
# As in jax._src.hardware_utils: v3, plc, v4, v5p, v5e, v6e, 7x. The vendor alone would not do:
# every virtual machine of Google has a network card of its own make.
_TPU_DEVICES = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


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
