"""Frozen parameters are neither differentiated, nor reduced, nor given optimizer state."""

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.tiers import EXHAUSTIVE, only
from support.training import assert_near, by_hand, normals, train

import replicax as rx

ROWS, WIDTH, RANK = 16, 32, 2
normal = normals(0)
MODEL = {
    "base": {"in": normal(WIDTH, WIDTH), "out": normal(WIDTH, WIDTH)},
    "lora": {"a": normal(WIDTH, RANK), "b": np.zeros((RANK, WIDTH), np.float32)},
}
DATA = {"x": normal(ROWS, WIDTH), "y": normal(ROWS, WIDTH)}
CASES = [
    *({"mode": mode} for mode in ("single", "jit", "shard_map", "pmap", "exact")),
    {"accumulate": 2},
    {"layout": "zero1"},
    {"layout": "fsdp"},
    {"precision": "bfloat16"},
    {"mode": "shard_map", "layout": "zero1"},
    {"mode": "exact", "layout": "zero1"},
    {"mode": "shard_map", "layout": "fsdp"},
]


def loss(model: Any, batch: Any, key: Any) -> Any:
    base, lora = model["base"], model["lora"]
    hidden = jnp.tanh(batch["x"] @ base["in"] / 6)
    found = (hidden @ base["out"] + hidden @ lora["a"] @ lora["b"]) / 6
    return jnp.mean((found - batch["y"]) ** 2, axis=1)


def made(**arguments: Any) -> rx.DataParallel:
    return rx.DataParallel(loss, optax.adamw(0.1), **{"trainable": "lora", **arguments})


@cache
def trained_alone() -> Any:
    def of_lora(lora: Any, batch: Any, key: Any) -> Any:
        return loss({"base": MODEL["base"], "lora": lora}, batch, key)

    return by_hand(of_lora, optax.adamw(0.1), MODEL["lora"], [DATA] * 3)[0]


@pytest.mark.parametrize("arguments", only([CASES[2], CASES[7], CASES[-1]], CASES), ids=str)
def test_the_trained_part_is_trained_as_alone_and_the_rest_stays(arguments: Any) -> None:
    dp = made(**arguments)
    state, _ = train(dp, MODEL, [DATA] * 3)
    model = dp.model(state)
    jax.tree.map(np.testing.assert_array_equal, model["base"], MODEL["base"])
    loose = 0.2 if arguments.get("precision") else 2e-5
    assert_near(model["lora"], trained_alone(), rtol=loose, atol=loose)
    held = [leaf.size for leaf in jax.tree.leaves(state.opt_state)]
    assert sum(held) == 2 * (2 * WIDTH * RANK) + 1  # Adam's two moments, and its count


@pytest.mark.parametrize(
    "trainable",
    ["lora", ["'a'", "'b'"], lambda path: path.startswith("['lora']"), re.compile(r"lora").search],
)
def test_ways_to_name_what_trains(trainable: Any) -> None:
    dp = made(trainable=trainable)
    before = dp.init(MODEL)
    after, _ = dp.step(before, DATA)
    assert np.any(dp.model(after)["lora"]["b"])
    jax.tree.map(np.testing.assert_array_equal, dp.model(after)["base"], MODEL["base"])


def reduced(compiled: str) -> int:
    """Return the number of floats that all-reduces send."""
    shapes = re.findall(r"(\S+|\([^)]*\)) all-reduce\(", compiled)
    sizes = [re.findall(r"f32\[([\d,]*)\]", shape) for shape in shapes]
    return sum(
        int(np.prod([int(n) for n in dims.split(",") if n])) for each in sizes for dims in each
    )


@pytest.mark.parametrize("fits", only([True], [False, True]))
@pytest.mark.parametrize("arguments", only([{}], [{}, {"mode": "shard_map"}, {"accumulate": 2}]))
def test_what_is_frozen_costs_no_bytes(arguments: Any, fits: bool) -> None:
    dp = made(**arguments)
    state = dp.abstract_state(MODEL)
    if fits:
        from replicax.train.guarded import guarded

        dp = guarded(dp, state)
    compiled = dp.lower(state, DATA).compile()
    assert 2 * WIDTH * RANK <= reduced(compiled.as_text()) < 2 * WIDTH * RANK + 16
    whole = rx.DataParallel(loss, optax.adamw(0.1), **arguments).lower(MODEL, DATA).compile()
    assert compiled.cost_analysis()["flops"] < 0.8 * whole.cost_analysis()["flops"]


class Adapted(nnx.Module):
    """A dense layer with LoRA."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.dense(x)))


@pytest.mark.parametrize(
    ("trainable", "trained"),
    [
        (nnx.LoRAParam, {"lora_a", "lora_b"}),
        (nnx.All(nnx.Param, nnx.PathContains("head")), {"head"}),
        ("lora", {"lora_a", "lora_b"}),
    ],
)
def test_filters_of_nnx(trainable: Any, trained: set[str]) -> None:
    def of_rows(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=1)

    dp = rx.DataParallel(of_rows, optax.adamw(0.1), trainable=trainable)
    state = dp.init(Adapted())
    before = jax.device_get(state.params)
    for _ in range(2):
        state, _ = dp.step(state, DATA)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        names = {entry.key for entry in path}
        old = before
        for entry in path:
            old = old[entry.key]
        assert np.array_equal(leaf, old) != bool(names & trained), names


def test_the_average_is_of_what_trains() -> None:
    dp = made(ema=0.5)
    state = dp.init(MODEL)
    first, _ = dp.step(state, DATA)
    jax.tree.map(np.testing.assert_array_equal, dp.model(first, ema=True)["base"], MODEL["base"])
    half = (MODEL["lora"]["a"] + np.asarray(dp.model(first)["lora"]["a"])) / 2
    np.testing.assert_allclose(dp.model(first, ema=True)["lora"]["a"], half, rtol=1e-6)
    held = sum(leaf.size for leaf in jax.tree.leaves(first.opt_state))
    assert held == 3 * (2 * WIDTH * RANK) + 1


def test_narrow_floats_take_part_where_they_are_frozen() -> None:
    def of_rows(model: Any, batch: Any, key: Any) -> Any:
        return (batch["x"] @ (model["w"] * model["q"].astype(jnp.float32))) ** 2

    w, batch = DATA["x"][0], {"x": DATA["x"]}
    model = {"w": w, "q": jnp.linspace(0, 4, WIDTH).astype(jnp.float8_e4m3fn)}
    state, _ = train(rx.DataParallel(of_rows, optax.sgd(0.1), trainable="w"), model, [batch])
    wide = model["q"].astype(jnp.float32)
    expected = w - 0.1 * jax.grad(lambda w: of_rows({"w": w, "q": wide}, batch, None).mean())(w)
    np.testing.assert_allclose(state.params["w"], expected, rtol=2e-5)
    np.testing.assert_array_equal(state.params["q"], model["q"])
    with pytest.raises(rx.errors.ConfigError, match=r"'q'.*float8_e4m3fn"):
        rx.DataParallel(of_rows, optax.sgd(0.1)).init(model)


@EXHAUSTIVE
def test_verify_takes_it() -> None:
    dp = made(mode="shard_map", ema=0.9)
    batch = {name: np.tile(leaf, (4, 1)) for name, leaf in DATA.items()}
    assert rx.verify(dp, MODEL, batch).ok


@pytest.mark.parametrize(
    ("trainable", "says"),
    [
        ("lola", r"'lola' .* 4 parameters.* \['base'\]\['in'\]"),
        ("(", "is no regex"),
        (3, "trainable=3; .*regex"),
        (nnx.Param, "for an NNX model"),
    ],
)
def test_what_names_nothing_is_refused(trainable: Any, says: str) -> None:
    with pytest.raises(rx.errors.ConfigError, match=says):
        made(trainable=trainable).init(MODEL)
