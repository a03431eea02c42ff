"""Precision `float16`: gradients that would underflow or overflow, and the loss scale."""

import functools
import itertools
from pathlib import Path
from statistics import fmean
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.resumable import bits
from support.tiers import only

import replicax as rx
from replicax.core.step import loss_scale
from replicax.core.step.loss_scale import (
    FIRST,
    LARGEST,
    LOSS_SCALE,
    OVERFLOWS,
    SMALLEST,
    Scale,
    value_of,
)
from replicax.train.guarded import NOT_FINITE, guarded
from replicax.train.hooks.figures import GRADIENT_NORM
from replicax.train.hooks.noise_scale import noise_probe

PLACES: dict[str, dict[str, Any]] = {
    "jit": {},
    "accumulated": {"accumulate": 2},
    "zero1": {"devices": 8, "layout": "zero1"},
    "fsdp": {"devices": 8, "layout": "fsdp"},
    "shard_map": {"mode": "shard_map"},
    "bfloat16 on the wire": {"mode": "shard_map", "reduction": "bfloat16"},
    "zero1 in shard_map": {"devices": 8, "mode": "shard_map", "layout": "zero1"},
    "fsdp in shard_map": {"devices": 8, "mode": "shard_map", "layout": "fsdp", "accumulate": 2},
    "zero1 in exact": {"devices": 8, "mode": "exact", "layout": "zero1"},
    "pmap": {"mode": "pmap"},
    "exact": {"devices": 8, "mode": "exact", "micro_shards": 8},
}
random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(64, 8)).astype(np.float32)}
DATA["y"] = np.tanh(DATA["x"] @ random.normal(size=(8, 4))).astype(np.float32)
MODEL = {"w": jnp.asarray(random.normal(size=(8, 4)) / 3, jnp.float32)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    assert batch["x"].dtype == model["w"].dtype == jnp.float16
    error = jnp.tanh(batch["x"] @ model["w"]) - batch["y"]
    return jnp.sum(error.astype(jnp.float32) ** 2, -1)


def in_float32(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum((jnp.tanh(batch["x"] @ model["w"]) - batch["y"]) ** 2, -1)


def parallel(
    place: str = "jit", loss: Any = loss, optimizer: Any = None, **more: Any
) -> rx.DataParallel:
    optimizer = optax.sgd(0.05) if optimizer is None else optimizer
    settings = {"precision": "float16", **PLACES[place], **more}
    return training.parallel(loss, optimizer, **settings)


def trained(dp: rx.DataParallel, steps: int = 12) -> tuple[rx.TrainState, list[dict[str, float]]]:
    return training.train(dp, MODEL, [DATA] * steps)


@functools.cache
def on_one_device() -> tuple[rx.TrainState, list[dict[str, float]]]:
    return trained(rx.DataParallel(loss, optax.sgd(0.05), precision="float16", mode="single"))


@pytest.mark.parametrize("place", only(["shard_map", "fsdp in shard_map"], list(PLACES)))
def test_it_is_the_step_of_one_device(place: str) -> None:
    wanted, theirs = on_one_device()
    found, mine = trained(parallel(place))
    bound = 2e-2 if "wire" in place else 2e-3
    for name in ("loss", LOSS_SCALE, OVERFLOWS):
        np.testing.assert_allclose([m[name] for m in mine], [t[name] for t in theirs], rtol=bound)
    np.testing.assert_allclose(found.params["w"], wanted.params["w"], atol=bound)
    skipped = int(found.scale.skipped)
    assert 0 < skipped < 8
    exactly = rx.DataParallel(in_float32, optax.sgd(0.05), mode="single")
    _, others = trained(exactly, 12 - skipped)
    assert mine[-1]["loss"] == pytest.approx(others[-1]["loss"], rel=5e-3)


def test_an_overflow_skips_the_step_halves_the_scale_and_is_counted() -> None:
    dp = parallel(optimizer=optax.adam(1e-2))
    before = dp.init({"w": MODEL["w"] * 4})
    held = bits(before)
    after, metrics = dp.step(before, {name: leaf * 30 for name, leaf in DATA.items()})
    assert float(metrics[LOSS_SCALE]) == FIRST
    assert np.isfinite(float(metrics["loss"]))
    assert [float(after.scale.value), int(after.scale.good), int(after.scale.skipped)] == [
        FIRST / 2, 0, 1,
    ]  # fmt: skip
    assert int(after.step) == 1
    kept = {name: leaf for name, leaf in bits(after).items() if "scale" not in name}
    assert {name: held[name] for name in kept if name != ".step"} == {
        name: leaf for name, leaf in kept.items() if name != ".step"
    }


def test_the_scale_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "PATIENCE", 3)
    scale, seen = Scale(jnp.float32(4), jnp.int32(0), jnp.int32(0)), []
    for overflow in (False, False, True, False, False, False, False):
        scale = scale.after(jnp.bool_(overflow))
        seen.append((float(scale.value), int(scale.good), int(scale.skipped)))
    assert seen == [(4, 1, 0), (4, 2, 0), (2, 0, 1), (2, 1, 1), (2, 2, 1), (4, 0, 1), (4, 1, 1)]
    most = Scale(jnp.float32(LARGEST), jnp.int32(2), jnp.int32(0)).after(jnp.bool_(False))
    least = Scale(jnp.float32(SMALLEST), jnp.int32(2), jnp.int32(0)).after(jnp.bool_(True))
    assert (float(most.value), float(least.value)) == (LARGEST, SMALLEST)


def test_a_gradient_too_small_for_float16_arrives() -> None:
    """The gradient of each row is 1e-9; the smallest number of float16 is 6e-8."""

    def small(model: Any, batch: Any, key: Any) -> Any:
        return (batch["x"] @ model["w"])[:, 0].astype(jnp.float32) * 1e-9

    state, _ = trained(parallel(loss=small, optimizer=optax.sgd(1e7)), 1)
    expected = MODEL["w"][:, 0] - 1e7 * 1e-9 * DATA["x"].mean(0)
    np.testing.assert_allclose(state.params["w"][:, 0], expected, rtol=2e-2, atol=1e-4)


def test_what_no_scale_mends_is_bad_and_not_an_overflow() -> None:
    def steep(model: Any, batch: Any, key: Any) -> Any:
        """A gradient of 0 times infinity."""
        return loss(model, batch, key) + jnp.sum(jnp.sqrt(batch["x"] @ model["w"] * 0), -1)

    def told(loss: Any, data: Any) -> tuple[list[bool], int]:
        dp = parallel(loss=loss, donate=False)
        state = dp.init(MODEL)
        safe, bad = guarded(dp, state), []
        for _ in range(32):
            state, metrics = safe.step(state, data)
            bad.append(bool(metrics[NOT_FINITE]))
        return bad, int(value_of(metrics[OVERFLOWS]))

    assert told(loss, {**DATA, "x": DATA["x"] * np.nan}) == ([True] * 32, 0)
    assert told(steep, DATA) == ([False] * 29 + [True] * 3, 29)


def test_a_run_goes_on(tmp_path: Path) -> None:
    def fit(folder: Path | None, steps: int) -> rx.types.Fit:
        dp = parallel("shard_map", optimizer=optax.adam(1e-2))
        where = {} if folder is None else {"run_dir": folder}
        return rx.fit(
            dp, dp.init(MODEL), DATA, batch_size=32, steps=steps, log_every=1, progress=False,
            accept_changes=True, **where,
        )  # fmt: skip

    fit(tmp_path / "run", 3)
    found, wanted = fit(tmp_path / "run", 7), fit(None, 7)
    assert bits(found.state) == bits(wanted.state)
    assert found.records[-1].metrics[LOSS_SCALE] <= LARGEST


def test_a_record_has_the_last_scale_and_no_norm_of_skipped_steps() -> None:
    def told(log_every: int) -> dict[int, dict[str, float]]:
        dp = parallel()
        result = rx.fit(
            dp, dp.init(MODEL), DATA, batch_size=8, steps=8, log_every=log_every, progress=False,
            hooks=[rx.hooks.GradientNorm()],
        )  # fmt: skip
        return {each.step: each.metrics for each in result.records}

    single, together = told(1), told(4)
    counts = [0, *(metrics[OVERFLOWS] for metrics in single.values())]
    skipped = [after > before for before, after in itertools.pairwise(counts)]
    assert [GRADIENT_NORM not in metrics for metrics in single.values()] == skipped
    assert 1 < sum(skipped) < 8
    assert list(together) == [1, 4, 8]
    for step, metrics in together.items():
        assert [metrics[name] for name in (LOSS_SCALE, OVERFLOWS)] == [
            single[step][name] for name in (LOSS_SCALE, OVERFLOWS)
        ]
    norms = [single[step].get(GRADIENT_NORM) for step in (5, 6, 7, 8)]
    assert together[8].get(GRADIENT_NORM) == pytest.approx(fmean(filter(None, norms)))


@pytest.mark.promise("exact.low-precision")
def test_exact_keeps_its_bits() -> None:
    one, eight = (
        trained(parallel("exact", optimizer=optax.adam(1e-2), devices=devices))[0]
        for devices in (1, 8)
    )
    assert bits(one) == bits(eight)


def test_the_noise_of_gradients_is_that_of_float32() -> None:
    """Gradients that would underflow in float16."""

    def noise(loss: Any, precision: str) -> float:
        dp = parallel(loss=lambda *given: loss(*given) * 1e-7).replace(precision=precision)
        state = dp.init(MODEL)
        (batch,) = dp.feed(DATA, batch_size=64)
        return float(noise_probe(dp, state)(state, batch).trace)

    assert noise(loss, "float16") == pytest.approx(noise(in_float32, "float32"), rel=1e-2)


def test_verify_compares_steps_that_were_taken() -> None:
    """The first steps overflow."""
    result = rx.verify(parallel(), MODEL, DATA, modes=["shard_map"], micro_batches=2)
    assert result.ok
    (check,) = (each for each in result.checks if each.case == "update")
    assert check.verdict == "pass"


def test_a_custom_step_is_refused() -> None:
    with pytest.raises(rx.errors.ConfigError, match="'bfloat16' or 'float32'"):
        rx.DataParallel(step=lambda s, b, k: (s, {}), precision="float16")
