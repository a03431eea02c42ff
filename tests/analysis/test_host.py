"""The capabilities of this host are measured."""

from types import SimpleNamespace

import jax
import pytest

from replicax.analysis import host
from replicax.analysis.hardware import CPU


def test_a_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, *(time for start in range(5) for time in (start, start + 0.5))])
    stopwatch = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(host, "time", stopwatch)
    monkeypatch.setattr(host, "SIZE", 8)
    assert host.product_flops_per_second(jax.devices()[0], "float32") == 2 * 8**3 / 0.5


def test_devices_share_what_the_host_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "product_flops_per_second", lambda device, dtype: 800.0)
    monkeypatch.setattr(host, "_bytes_per_second", lambda device: 400.0)
    chip = host.measured(CPU, 8)
    assert chip.flops_per_second == dict.fromkeys(("float32", "bfloat16", "float16"), 100.0)
    assert chip.memory_bytes_per_second == 50.0
    assert "8 devices" in chip.sources["flops_per_second"]


def test_memory_is_as_fast_as_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {size // 4: number for number, size in enumerate(host.CACHED_BYTES, 1)}
    monkeypatch.setattr(host, "_best_seconds", lambda function, ones: seconds[ones.size])
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert host._bytes_per_second(jax.devices()[0]) == 3 * 2 * host.PASSED_BYTES
