"""State with rows: split like the batch, equal to one device in every mode, resumed on any."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import training
from support.custom_step import in_micro_batches
from support.tiers import only

import replicax as rx
from replicax.train.guarded import guarded

ROWS, BATCH = 36, 10


def source() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, 2, 3])}


def begun() -> dict[str, Any]:
    hidden = {"h": jnp.zeros((BATCH, 3)), "seen": jnp.zeros(BATCH, jnp.int32)}
    keys = jax.random.split(jax.random.key(7), BATCH)
    return {"w": jnp.full(3, 0.1), "hidden": rx.ByRow(hidden), "keys": rx.ByRow(keys)}


def drawn(keys: Any) -> tuple[Any, Any]:
    """Return noise of each row, and its next key."""
    split = jax.vmap(jax.random.split)(keys)
    return jax.vmap(lambda key: jax.random.normal(key, (3,)))(split[:, 1]), split[:, 0]


def after(hidden: Any, w: Any, x: Any, noise: Any) -> Any:
    """Return the hidden state of some rows after a step."""
    return 0.7 * hidden + x * w + 0.01 * noise


def loss(w: Any, batch: Any, key: Any) -> Any:
    hidden = after(batch["h"], w, batch["x"], batch["noise"])
    return (hidden.sum(-1) - batch["y"]) ** 2, {"hidden": rx.ByRow(hidden)}


def step(state: Any, batch: Any, key: Any) -> Any:
    hidden, (noise, keys) = state["hidden"].value, drawn(state["keys"].value)
    seen = {**batch, "h": hidden["h"], "noise": noise}
    means, gradient, rows = rx.value_and_grad(loss, rows=True)(state["w"], seen, key)
    hidden = {"h": rows["hidden"], "seen": hidden["seen"] + 1}
    w = state["w"] - 0.05 * gradient
    return {"w": w, "hidden": rx.ByRow(hidden), "keys": rx.ByRow(keys)}, means


@functools.cache
def on_one_device() -> tuple[list[float], dict[str, Any]]:
    """Return losses and state of plain JAX, whose last batch has 6 of 10 rows."""
    state, losses = begun(), []
    w, h = state["w"], state["hidden"].value["h"]
    keys, seen = state["keys"].value, state["hidden"].value["seen"]
    for batch in training.slices(source(), BATCH):
        count = len(batch["x"])
        noise, next_keys = drawn(keys[:count])
        batch |= {"h": h[:count], "noise": noise}

        def of(w: Any, batch: Any = batch) -> Any:
            losses, rows = loss(w, batch, None)
            return jnp.mean(losses), rows["hidden"].value

        (value, hidden), gradient = jax.value_and_grad(of, has_aux=True)(w)
        w, h, seen = w - 0.05 * gradient, h.at[:count].set(hidden), seen.at[:count].add(1)
        keys = keys.at[:count].set(next_keys)
        losses.append(float(value))
    return losses, {"w": w, "h": h, "seen": seen, "keys": jax.random.key_data(keys)}


def parallel(mode: str = "jit", devices: int = 4, **settings: Any) -> rx.DataParallel:
    return training.parallel(mode=mode, devices=devices, **{"step": step, **settings})


def assert_like(model: Any, expected: dict[str, Any]) -> None:
    hidden = model["hidden"].value
    np.testing.assert_allclose(model["w"], expected["w"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(hidden["h"], expected["h"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(hidden["seen"], expected["seen"])
    np.testing.assert_array_equal(jax.random.key_data(model["keys"].value), expected["keys"])


@in_micro_batches
def test_it_equals_one_device(mode: str, devices: int, accumulate: int) -> None:
    losses, expected = on_one_device()
    dp = parallel(mode, devices, accumulate=accumulate)
    state, told = training.train(dp, begun(), dp.feed(source(), BATCH))
    np.testing.assert_allclose(training.losses(told), losses, rtol=1e-6)
    assert_like(dp.model(state), expected)


def fitted(state: Any, batch: Any, key: Any) -> Any:
    """Train on the root of what the state leaves of each row: NaN for rows that do not belong."""

    def root(w: Any, batch: Any, key: Any) -> Any:
        return (w * jnp.sqrt(batch["limit"] - batch["used"]) - 1) ** 2

    used = state["used"].value
    means, gradient = rx.value_and_grad(root)(state["w"], {**batch, "used": used}, key)
    return {"w": state["w"] - gradient, "used": rx.ByRow(used + 1)}, means


@in_micro_batches
def test_padding_is_a_real_row_with_its_state(mode: str, devices: int, accumulate: int) -> None:
    """On four devices the last two have one real row, and none."""
    place = np.arange(16, dtype=np.float32)
    used = np.where(place < 9, place, np.nan)
    dp = parallel(mode, devices, accumulate=accumulate, step=fitted)
    state = dp.init({"w": jnp.ones(()), "used": rx.ByRow(jnp.asarray(used))})
    state, _ = dp.step(state, next(iter(dp.feed({"limit": place[:9] + 4}, 16))))
    after = dp.model(state)
    np.testing.assert_allclose(after["w"], 1 - 4, rtol=1e-6)  # of (2 w - 1)^2
    np.testing.assert_array_equal(after["used"].value, used + 1)


def test_it_lies_where_the_rows_do_and_one_row_of_each_replica_moves() -> None:
    dp = parallel("shard_map")
    state = dp.init(begun())
    hidden = state.params["hidden"].value["h"]
    assert hidden.shape == (12, 3)
    assert {shard.data.shape for shard in hidden.addressable_shards} == {(3, 3)}
    text = dp.lower(begun(), jax.tree.map(lambda leaf: leaf[:BATCH], source())).compile().as_text()
    moved = re.findall(r"= (.+) (all-[a-z-]+|reduce-[a-z-]+|collective-[a-z-]+)\(", text)
    assert {kind for _, kind in moved} == {"all-gather", "all-reduce"}
    assert not any("12" in shapes for shapes, _ in moved)


@pytest.mark.parametrize("mode", only([], ["jit", "shard_map", "exact"]))
def test_a_run_resumes_on_another_number_of_devices(mode: str, tmp_path: Path) -> None:
    def run(devices: int, folder: Path | None, until: int | None) -> Any:
        dp = parallel(mode, devices)
        with rx.Run(
            dp, dp.init(begun()), source(), batch_size=BATCH, epochs=2, run_dir=folder
        ) as run:
            for batch in run:
                run.step(batch)
                if run.place.step == until:
                    break
        return run

    whole = run(1, None, None)
    for devices, until in ((4, 2), (1, 5), (2, None)):
        resumed = run(devices, tmp_path / "run", until)
    expected = whole.dp.model(whole.state)
    hidden = expected["hidden"].value
    assert_like(
        resumed.dp.model(resumed.state),
        {
            "w": expected["w"],
            **hidden,
            "keys": jax.random.key_data(expected["keys"].value),
        },
    )
    dp = parallel("jit", 3)
    loaded = rx.load(tmp_path / "run", dp=dp, state=dp.init(begun()))
    np.testing.assert_array_equal(
        loaded.model["hidden"].value["h"], resumed.dp.model(resumed.state)["hidden"].value["h"]
    )


@pytest.mark.parametrize("mode", only(["shard_map"], ["jit", "shard_map", "pmap", "exact"]))
def test_a_guard_skips_a_step_with_a_bad_row(mode: str) -> None:
    def broken(state: Any, batch: Any, key: Any) -> Any:
        after, means = step(state, batch, key)
        hidden = after["hidden"].value
        bad = jnp.where(batch["x"][:, :1] == source()["x"][2, 0], jnp.nan, hidden["h"])
        return {**after, "hidden": rx.ByRow({**hidden, "h": bad})}, means

    dp = parallel(mode, 2, step=broken)
    safe, state = guarded(dp, dp.init(begun())), dp.init(begun())
    batch = {name: rows[:BATCH] for name, rows in source().items()}
    state, metrics = safe.step(state, batch)
    assert int(metrics["not_finite"]) > 0
    assert_like(
        safe.model(state),
        {
            **begun()["hidden"].value,
            "w": begun()["w"],
            "keys": jax.random.key_data(begun()["keys"].value),
        },
    )


def mixing(state: Any, batch: Any, key: Any) -> Any:
    after, means = step(state, batch, key)
    hidden = after["hidden"].value
    return {**after, "hidden": rx.ByRow({**hidden, "h": hidden["h"] - hidden["h"].mean(0)})}, means


def test_rows_that_mix_are_refused() -> None:
    dp = parallel("shard_map", step=mixing)
    with pytest.raises(rx.errors.LossError, match=r"state\.hidden"):
        dp.step(dp.init(begun()), {name: rows[:BATCH] for name, rows in source().items()})


def test_a_batch_of_more_rows_is_refused_and_one_of_fewer_is_padded() -> None:
    dp = parallel("jit", 2)
    state = dp.init(begun())
    with pytest.raises(rx.errors.StateError, match=r"10 rows .* 36"):
        dp.step(state, source())
    state, _ = dp.step(state, {name: rows[:4] for name, rows in source().items()})
    assert dp.model(state)["hidden"].value["seen"].tolist() == [1] * 4 + [0] * 6


@pytest.mark.parametrize(
    ("settings", "state", "said"),
    [
        ({"rounds": rx.Rounds(every=2, axis="data")}, begun(), "islands"),
        ({}, {**begun(), "other": rx.ByRow(jnp.zeros(3))}, "10 and 3 rows|3 and 10 rows"),
        ({}, {**begun(), "other": rx.ByRow(jnp.zeros(()))}, "no and 10 rows|10 and no rows"),
    ],
)
def test_what_cannot_have_rows_is_refused(settings: Any, state: Any, said: str) -> None:
    with pytest.raises(rx.errors.ConfigError, match=said) as caught:
        parallel("shard_map", 2, **settings).init(state)
    assert "\n" not in str(caught.value)
