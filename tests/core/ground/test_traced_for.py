"""The target of a trace: JAX must not reuse a trace for other devices."""

from types import SimpleNamespace

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from replicax.core.ground.traced_for import cuda_capability, traced_for


def test_a_function_is_traced_anew_for_other_devices_and_once_for_each() -> None:
    traced: list[float | None] = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        traced.append(cuda_capability())
        return x * (2 if traced[-1] else 3)

    def result() -> float:
        return float(step(jnp.float32(1)))

    assert result() == 3
    for _ in range(2):
        with traced_for(9.0):
            assert result() == 2
        with traced_for(8.0):
            assert result() == 2
        assert result() == 3
    assert traced == [None, 9.0, 8.0]


@pytest.mark.parametrize(("version", "capability"), [("cuda 13000", 9.0), ("rocm 70000", None)])
def test_attached_devices_tell_theirs(
    version: str, capability: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        jax.extend.backend, "get_backend", lambda: SimpleNamespace(platform_version=version)
    )
    devices = [SimpleNamespace(compute_capability="9.0")]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert cuda_capability() == capability
    with traced_for(8.0):
        assert cuda_capability() == 8.0
