"""Parameters gathered where a loss uses them, and updates of each replica's shard."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.tiers import EXHAUSTIVE, exhaustive
from support.training import assert_near, parallel, train

import replicax as rx
from replicax.analysis.schedule import read_schedule
from replicax.errors import ConfigError

LAYERS, WIDTH = 4, 16
ADAM, ADAMW = optax.adam(1e-2), optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)


def model() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "table": jax.random.normal(keys[0], (24, WIDTH)) / 4,
        "h": {
            "w": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / 4,
            "b": jnp.zeros((LAYERS, WIDTH)),
        },
        "out": jax.random.normal(keys[2], (WIDTH, 8)) / 4,
        "odd": jnp.ones(3),
    }


def batch(rows: int = 13) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "token": random.integers(0, 24, rows).astype(np.int32),
        "label": random.integers(0, 8, rows).astype(np.int32),
    }


def layer(x: jax.Array, own: Any) -> jax.Array:
    return x + jnp.tanh(x @ own["w"] + own["b"])


def scanned(x: jax.Array, h: Any) -> jax.Array:
    return lax.scan(lambda x, own: (layer(x, own), None), x, h)[0]


def checkpointed(x: jax.Array, h: Any) -> jax.Array:
    body = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    return lax.scan(lambda x, own: (body(x, own), None), x, h)[0]


def unrolled(x: jax.Array, h: Any) -> jax.Array:
    for number in range(LAYERS):
        x = jax.jit(layer)(x, jax.tree.map(lambda leaf, n=number: leaf[n], h))
    return x


def looped(x: jax.Array, h: Any) -> jax.Array:
    """The last layer, twice: a loop that is not a scan over a stack."""
    own = jax.tree.map(lambda leaf: leaf[-1], h)
    x = lax.fori_loop(0, 2, lambda _, x: layer(x, own), x)
    return lax.cond(jnp.sum(own["w"]) > 1e6, lambda x: x, lambda x: layer(x, own), x)


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, dy: (dy @ kept[1].T, kept[0].T @ dy))


def ruled(x: jax.Array, h: Any) -> jax.Array:
    def step(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(product(x, own["w"]) + own["b"]), None

    return lax.scan(step, x, h, reverse=True)[0]


BODIES = (scanned, checkpointed, unrolled, looped, ruled)


def loss_of(body: Any) -> Any:
    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        x = body(model["table"][batch["token"]], model["h"])
        logits = (x @ model["out"]) * jnp.prod(model["odd"])
        tied = jnp.sum((x @ model["table"].T) ** 2, axis=-1)
        labels = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return labels + 0.01 * tied

    return loss


def trained(loss: Any, optimizer: Any = ADAM, **settings: Any) -> rx.TrainState:
    dp = parallel(loss, optimizer, **{"devices": 8, **settings})
    return train(dp, model(), [batch()] * 5)[0]


@functools.cache
def on_one_device(body: Any) -> rx.TrainState:
    return trained(loss_of(body), mode="single")


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        (scanned, "shard_map"),
        (scanned, "jit"),  # where XLA gathers, whatever the form
        *(exhaustive((body, mode)) for body in BODIES[1:] for mode in ("shard_map", "jit")),
    ],
)
def test_a_loss_of_any_form_trains_as_on_one_device(body: Any, mode: str) -> None:
    many = trained(loss_of(body), mode=mode, layout="fsdp")
    assert_near(many.params, on_one_device(body).params, rtol=0)


def text_of(loss: Any, **settings: Any) -> str:
    dp = rx.DataParallel(loss, ADAM, mode="shard_map", layout="fsdp", **settings)
    return dp.lower(model(), batch(16)).compile().as_text() or ""


def test_a_scan_gathers_each_layer_by_itself_and_what_is_used_twice_once() -> None:
    sent: dict[tuple[str, str], int] = {}
    for each in read_schedule(text_of(loss_of(scanned))).collectives:
        for shape in each.shapes:
            sent[each.kind, shape] = sent.get((each.kind, shape), 0) + each.runs
    whole, part = f"f32[{WIDTH},{WIDTH}]", f"f32[{WIDTH // 8},{WIDTH}]"
    assert sent["all-gather", whole] == 2 * LAYERS  # forward, and again backward
    assert sent["reduce-scatter", part] == LAYERS
    assert sent["all-gather", f"f32[24,{WIDTH}]"] == 1  # the table, for both its uses
    assert sent["reduce-scatter", f"f32[3,{WIDTH}]"] == 1
    assert ("all-gather", f"f32[{WIDTH},24]") not in sent
    assert not any(f"[{LAYERS},{WIDTH},{WIDTH}]" in shape for _, shape in sent)


def test_gathers_have_the_dtype_of_the_computation_and_sums_float32() -> None:
    dp = rx.DataParallel(
        loss_of(scanned), ADAM, mode="shard_map", layout="fsdp", precision="bfloat16"
    )
    # As traced: XLA's CPU backend widens what it sends.
    text = str(dp.trace(model(), batch(16)).jaxpr)
    assert set(re.findall(r":(\w+)\[[\d,]*\] = all_gather\[", text)) == {"bf16"}
    assert set(re.findall(r":(\w+)\[[\d,]*\] = reduce_scatter\[", text)) == {"f32"}


@EXHAUSTIVE
def test_exact_has_the_same_bits_with_the_optimizer_split() -> None:
    states = [
        trained(loss_of(scanned), ADAMW, mode="exact", layout=layout, devices=devices)
        for layout, devices in (("replicated", 2), ("zero1", 1), ("zero1", 2), ("zero1", 8))
    ]
    bits = [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)] for state in states]
    assert bits[1] == bits[2] == bits[3]
    assert_near(*states[:2], rtol=1e-4)
    moment = next(leaf for leaf in jax.tree.leaves(states[3].opt_state) if leaf.ndim == 3)
    assert moment.addressable_shards[0].data.size == moment.size // 8


@pytest.mark.promise("exact.refuses-what-it-cannot-hold")
def test_exact_refuses_to_split_the_state_of_an_optimizer_that_mixes_places() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(jnp.sort, updates), state

    optimizer = optax.chain(optax.GradientTransformation(lambda params: (), update), ADAM)
    dp = rx.DataParallel(loss_of(scanned), optimizer, mode="exact", layout="zero1")
    with pytest.raises(ConfigError, match=r"sort.*8 micro-shards.*'replicated'") as caught:
        dp.init(model())
    assert "\n" not in str(caught.value)
