"""`LearningRate`, `DeviceMemory` and `Throughput`: the figures of train records."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.errors import ConfigError
from replicax.train.files.records import Record
from replicax.train.hooks import figures as module

SCHEDULE = optax.linear_schedule(0.5, 0.0, 10)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((batch["x"] @ model["w"] - batch["y"]) ** 2, axis=-1)


def rows(bad_from: int | None = None) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    if bad_from is not None:
        x[bad_from : bad_from + 8] = np.nan
    return {"x": x, "y": 2 * x}


def fit(optimizer: Any, hook: rx.Hook, source: Any = None, **settings: Any) -> list[Record]:
    """Return the train records of 8 steps: the first and every second have one."""
    dp = rx.DataParallel(loss, optimizer, **settings)
    result = rx.fit(
        dp,
        dp.init({"w": jnp.zeros((4, 4))}),
        rows() if source is None else source,
        batch_size=8,
        shuffle=False,
        epochs=1,
        log_every=2,
        hooks=[hook],
        progress=False,
    )
    assert result.failed_hooks == ()
    return [record for record in result.records if record.kind == "train"]


def figures(records: list[Record], name: str) -> dict[int, float]:
    return {record.step: (record.figures or {})[name] for record in records}


def test_a_skipped_update_does_not_count_as_the_optimizer_counts() -> None:
    source = rows(bad_from=16)  # the third step
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE)
    found = figures(fit(injected, rx.hooks.LearningRate(), source), "learning_rate")
    assert found[8] == pytest.approx(float(SCHEDULE(6)))
    found = figures(
        fit(optax.sgd(SCHEDULE), rx.hooks.LearningRate(SCHEDULE), source), "learning_rate"
    )
    assert found[8] == float(SCHEDULE(6))


@pytest.mark.parametrize("ema", [None, 0.9])
def test_it_is_found_beside_what_replicax_wraps_around_the_optimizer(ema: float | None) -> None:
    injected = optax.chain(
        optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.25)
    )
    found = figures(fit(injected, rx.hooks.LearningRate(), ema=ema, trainable="w"), "learning_rate")
    assert found[8] == 0.25


def test_a_rate_that_is_nowhere_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"inject_hyperparams") as raised:
        fit(optax.sgd(0.1), rx.hooks.LearningRate())
    assert "\n" not in str(raised.value)


def test_memory_is_the_peak_of_the_fullest_device() -> None:
    def run(*told: Any) -> Any:
        devices = [types.SimpleNamespace(memory_stats=lambda each=each: each) for each in told]
        mesh = types.SimpleNamespace(local_devices=devices)
        return types.SimpleNamespace(dp=types.SimpleNamespace(mesh=mesh))

    hook, record = rx.hooks.DeviceMemory(), Record("train", 1, 0, {}, 1, 1.0)
    told = {"peak_bytes_in_use": 3}, {"peak_bytes_in_use": 5}, {"bytes_in_use": 9}
    assert hook.figures(run(*told), record) == {"device_memory_bytes": 5.0}
    assert hook.figures(run(None), record) == {}


def test_tokens_follow_from_the_rate_of_rows() -> None:
    records = fit(optax.sgd(0.1), rx.hooks.Throughput(tokens_per_row=3))
    assert records[0].figures is None  # the time of the first step is unknown
    for record in records[1:]:
        assert record.figures == {"tokens_per_second": 3 * record.rows_per_second}


def test_the_peak_is_that_of_all_devices_and_flops_are_those_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chip = types.SimpleNamespace(flops_per_second={"float32": 1e6})
    monkeypatch.setattr(module, "chip_of_kind", lambda kind: chip)
    flops = {"counted": 2 * (2 * 4 * 4), "given": 10.0}  # forward, and weights; no input
    for hook, of_row in (
        (rx.hooks.Throughput(), flops["counted"]),
        (rx.hooks.Throughput(flops_per_row=10.0), flops["given"]),
    ):
        for record in fit(optax.sgd(0.1), hook)[1:]:
            expected = record.rows_per_second * of_row / (1e6 * jax.device_count())
            assert record.figures == {"peak_flops_fraction": pytest.approx(expected)}
    assert fit(optax.sgd(0.1), rx.hooks.Throughput(), precision="bfloat16")[-1].figures is None
