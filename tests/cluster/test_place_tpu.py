"""A process's place on a TPU pod, from the environment and from its metadata server."""

import http.server
import socket
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from replicax.cluster import tpu_pod
from replicax.cluster.place import find_place
from replicax.core.ground import jax_internals
from replicax.errors import ConfigError

IS_TPU_VM = tpu_pod.is_tpu_vm
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t"}


@pytest.fixture(autouse=True)
def _no_tpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_pod, "is_tpu_vm", lambda: False)


def test_tpu_pod_from_the_environment() -> None:
    place = find_place(TPU)
    assert (place.process, place.processes, place.engine) == (1, 2, "TPU")
    assert place.coordinator == "t-0.t:8482"
    assert find_place({"TPU_WORKER_HOSTNAMES": "localhost"}).processes == 1
    ports = {"TPU_WORKER_ID": "1", "TPU_PROCESS_ADDRESSES": "[::1]:8476,[::1]:8477"}
    assert find_place(ports).coordinator == "[::1]:8482"


def test_tpu_slices() -> None:
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "s0-0.t:8080",
    }
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}
    # One indexed Job a slice: its index is the worker's, not the process's.
    place = find_place({**TPU, **slices, **pod})
    assert (place.process, place.processes, place.coordinator) == (3, 4, "s0-0.t:8482")
    assert place.reasons["process"] == "TPU_WORKER_ID=1, MEGASCALE_SLICE_ID"
    assert place.reasons["processes"] == "TPU_WORKER_HOSTNAMES, MEGASCALE_NUM_SLICES"
    del slices["MEGASCALE_COORDINATOR_ADDRESS"]
    with pytest.raises(ConfigError, match="without MEGASCALE_COORDINATOR_ADDRESS"):
        find_place({**TPU, **slices})


def test_one_tpu_slice_is_not_mentioned() -> None:
    line = find_place(TPU).line()
    assert line.startswith(
        "process 1 of 2 (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES); coordinator t-0.t:8482 ("
    )
    assert line.endswith("of TPU_WORKER_HOSTNAMES)")
    assert "slice" not in line


def test_tpu_contradictions() -> None:
    with pytest.raises(ConfigError, match="TPU_WORKER_HOSTNAMES is empty"):
        find_place({**TPU, "TPU_WORKER_HOSTNAMES": ""})
    with pytest.raises(ConfigError, match=r"TPU_WORKER_ID='one' .*an integer"):
        find_place({**TPU, "TPU_WORKER_ID": "one"})
    with pytest.raises(ConfigError, match=r"TPU_WORKER_ID='²' .*an integer"):
        find_place({**TPU, "TPU_WORKER_ID": "²"})
    with pytest.raises(ConfigError, match=r"MEGASCALE_NUM_SLICES='0' .*an integer .* 1"):
        find_place({**TPU, "MEGASCALE_NUM_SLICES": "0"})
    slices = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "2"}
    with pytest.raises(ConfigError, match="MEGASCALE_SLICE_ID=2 with MEGASCALE_NUM_SLICES=2"):
        find_place({**TPU, **slices})
    with pytest.raises(ConfigError, match="TPU_WORKER_ID=2 and TPU_WORKER_HOSTNAMES lists 2"):
        find_place({**TPU, "TPU_WORKER_ID": "2"})
    with pytest.raises(ConfigError, match=r"lists 2 hosts .*_WORKER_ID is not\b"):
        find_place({"TPU_WORKER_HOSTNAMES": "a,b"})


class _Metadata(http.server.BaseHTTPRequestHandler):
    ATTRIBUTES: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        value = self.ATTRIBUTES.get(self.path.rpartition("/")[2])
        flavored = self.headers["Metadata-Flavor"] == "Google"
        self.send_response(404 if value is None else 200 if flavored else 403)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(tpu_pod, "is_tpu_vm", lambda: True)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_tpu_pod_from_its_metadata_server(
    metadata_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes = {
        "agent-worker-number": "1",
        "worker-network-endpoints": "w:0:10.0.0.4,w:1:10.0.0.5",
        "tpu-env": "ACCELERATOR_TYPE: 'v5e-8'\nMEGASCALE_NUM_SLICES: '2'\n"
        "MEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'\n",
    }
    monkeypatch.setattr(_Metadata, "ATTRIBUTES", attributes)
    place = find_place({"GCE_METADATA_IP": metadata_server})
    assert (place.process, place.processes, place.coordinator) == (3, 4, "10.0.0.1:8482")
    attributes["tpu-env"] = ""
    place = find_place({"GCE_METADATA_IP": metadata_server})
    assert (place.process, place.processes, place.coordinator) == (1, 2, "10.0.0.4:8482")
    skipped = find_place({"GCE_METADATA_IP": metadata_server, "TPU_SKIP_MDS_QUERY": "1"})
    assert skipped.engine == "nothing"


def test_a_tpu_that_is_in_no_pod_is_alone(
    metadata_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Metadata, "ATTRIBUTES", {})
    assert find_place({"GCE_METADATA_IP": metadata_server}).engine == "nothing"


def test_a_tpu_whose_metadata_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_pod, "is_tpu_vm", lambda: True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}/.* did not .*TPU_WORKER_ID"):
            find_place({"GCE_METADATA_IP": address})


def test_what_counts_as_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def unplugged() -> tuple[int, None]:
        raise FileNotFoundError("/sys/bus/pci/devices/0/device")

    for found, is_tpu in ((lambda: (0, None), False), (lambda: (4, 5), True), (unplugged, False)):
        monkeypatch.setattr(jax_internals, "tpu_chips", found)
        assert IS_TPU_VM() == is_tpu
