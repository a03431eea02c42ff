from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.figures import assert_mentions

import replicax as rx
from replicax.core.first_step import memory_check


def wide(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(jnp.tanh(batch[:, :, None] * model), axis=(1, 2))


def test_a_state_that_cannot_fit_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_check, "free_host_bytes", lambda: 2**20 - 1)
    monkeypatch.setattr(memory_check, "GIBIBYTE", 2**20)
    model = jnp.ones(2**17)  # with Adam's two moments 1.5 MiB
    halves = rx.make_mesh(2)
    with pytest.raises(rx.errors.ConfigError) as caught:
        rx.DataParallel(wide, optax.adam(0.1), mesh=rx.make_mesh(1)).init(model)
    text = str(caught.value)
    assert_mentions(text, "training state", "1.5 GiB per", "1.0 GiB are")
    assert "fsdp" in text
    with pytest.raises(rx.errors.ConfigError, match=r"1\.5 GiB on 2 host devices"):
        rx.DataParallel(wide, optax.adam(0.1), mesh=halves, layout="fsdp").init(model)
    with pytest.raises(rx.errors.ConfigError, match=r"3\.0 GiB on 2 host devices"):
        rx.DataParallel(wide, optax.adam(0.1), mesh=halves).init(model)


def first_step(**options: Any) -> None:
    dp = rx.DataParallel(wide, optax.sgd(0.1), **options)
    state = dp.init(jnp.ones(256))
    (batch,) = dp.feed(np.ones((8, 64), np.float32), 8)
    dp.step(state, batch)


def test_a_step_that_cannot_fit_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_check, "free_host_bytes", lambda: 2**18)
    monkeypatch.setattr(memory_check, "GIBIBYTE", 2**20)
    with pytest.raises(rx.errors.ConfigError) as caught:
        first_step(mesh=rx.make_mesh(2))
    text = str(caught.value)
    assert_mentions(text, "step of 8 rows", "2 host devices", "training state", "0.2 GiB are")
    assert_mentions(text, "lower the", "batch size")
    assert "\n" not in text


def test_a_host_that_does_not_tell_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_host_bytes", lambda: None)
    first_step(mesh=rx.make_mesh(2))


def test_the_host_says_what_is_free() -> None:
    free = memory_check.free_host_bytes()
    assert free is not None
    assert 2**20 < free < 2**50


class Device:
    def __init__(self, platform: str = "gpu", **stats: int) -> None:
        self.platform, self._stats = platform, stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats or None


class Devices:
    def __init__(self, *devices: Device) -> None:
        self.local_devices = devices


def test_of_accelerators_the_fullest_counts() -> None:
    full, empty = (Device(bytes_limit=100, bytes_in_use=used) for used in (90, 0))
    assert memory_check._free_bytes(Devices(empty, full)) == 10  # type: ignore[arg-type]
    assert memory_check._free_bytes(Devices(Device())) is None  # type: ignore[arg-type]


def assert_needs(needs: int, programs: list[Any], platform: str) -> None:
    """Check that the programs fit into so many bytes, and not into one less."""
    free, used = (Devices(Device(platform, bytes_limit=needs, bytes_in_use=n)) for n in (0, 1))
    memory_check.check_fits(programs, free, 8)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.ConfigError, match="a step of 8 rows needs"):
        memory_check.check_fits(programs, used, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("platform", "needs"), [("gpu", 20 - 12 + 70), ("tpu", 50 - 30)])
def test_what_a_compiled_step_needs_beside_its_arguments(platform: str, needs: int) -> None:
    stats = SimpleNamespace(
        argument_size_in_bytes=30,
        output_size_in_bytes=20,
        alias_size_in_bytes=12,
        temp_size_in_bytes=70,
        peak_memory_in_bytes=50,
    )
    compiled: Any = SimpleNamespace(memory_analysis=lambda: stats)
    assert_needs(needs, [compiled], platform)


def test_what_several_programs_return_is_held_together() -> None:
    stats = SimpleNamespace(output_size_in_bytes=20, alias_size_in_bytes=12, temp_size_in_bytes=70)
    compiled: Any = SimpleNamespace(memory_analysis=lambda: stats)
    assert_needs(2 * (20 - 12) + 70, [compiled, compiled], "gpu")
