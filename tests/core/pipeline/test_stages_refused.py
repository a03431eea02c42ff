"""Losses, rules, steps and models that cannot be divided into pipeline stages."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.figures import refused
from support.staged import LAYERS, ROWS, RULES, head, layer, loss, made, model, rows

import replicax as rx
from replicax.errors import ConfigError, LossError


def in_a_loop(model: Any, batch: Any, key: Any) -> Any:
    x = model["embedding"][batch["tokens"]]
    for number in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda leaf, n=number: leaf[n], model["h"]))
    return head(model, x, batch)


def twice(model: Any, batch: Any, key: Any) -> Any:
    x = model["embedding"][batch["tokens"]]
    for _ in range(2):
        x, _ = lax.scan(layer, x, model["h"])
    return head(model, x, batch)


def decayed(model: Any, batch: Any, key: Any) -> Any:
    value, metrics = loss(model, batch, key)
    return value, {**metrics, "norm": jnp.full(len(batch["next"]), jnp.sum(model["h"]["up"] ** 2))}


def by_layer(model: Any, batch: Any, key: Any) -> Any:
    def step(x: jax.Array, block: Any) -> Any:
        x, _ = layer(x, block)
        return x, x

    _, states = lax.scan(step, model["embedding"][batch["tokens"]], model["h"])
    return head(model, jnp.mean(states, axis=0), batch)


def from_the_last(model: Any, batch: Any, key: Any) -> Any:
    x, _ = lax.scan(layer, model["embedding"][batch["tokens"]], model["h"], reverse=True)
    return head(model, x, batch)


def whole_remat(model: Any, batch: Any, key: Any) -> Any:
    def blocks(x: jax.Array, h: Any) -> jax.Array:
        return lax.scan(layer, x, h)[0]

    return head(
        model, jax.checkpoint(blocks)(model["embedding"][batch["tokens"]], model["h"]), batch
    )


def carried_key(model: Any, batch: Any, key: Any) -> Any:
    def step(carry: Any, block: Any) -> Any:
        x, key = carry
        noise = jax.random.normal(key, x.shape)
        return (layer(x, block)[0] + noise, jax.random.fold_in(key, 1)), None

    start = (model["embedding"][batch["tokens"]], key)
    (x, _), _ = lax.scan(step, start, model["h"])
    return head(model, x, batch)


def gathering(model: Any, batch: Any, key: Any) -> Any:
    value, _ = loss(model, batch, key)
    return rx.Weighted(value.values - jnp.mean(rx.gather(value.values)), value.weights)


def centred(model: Any, batch: Any, key: Any) -> Any:
    value, _ = loss(model, batch, key)
    return rx.Weighted(value.values - jnp.mean(value.values, axis=0), value.weights)


def beside_others(model: Any, batch: Any, key: Any) -> Any:
    h = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), model["h"])
    x, _ = lax.scan(layer, model["embedding"][batch["tokens"]], h)
    return head(model, x, batch)


def with_statistics(model: Any, batch: Any, key: Any) -> Any:
    value, metrics = loss(model.model, batch, key)
    return rx.NewState((value, metrics), model.state + 1)


def stateful() -> rx.Stateful:
    return rx.Stateful(model(), jnp.int32(0))


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"loss": in_a_loop}, ROWS, r"\['h'\]\['bias'\].*2 stages.*lax\.scan"),
    ({"loss": twice}, ROWS, r"\['h'\]\['bias'\].*2 scans"),
    ({"loss": decayed}, ROWS, r"\['h'\]\['up'\].*integer_pow"),
    ({"loss": by_layer}, ROWS, "per layer.*carry"),
    ({"loss": from_the_last}, ROWS, "reverse"),
    ({"loss": whole_remat}, ROWS, r"jax\.checkpoint"),
    ({"loss": carried_key}, ROWS, r"random keys.*jax\.random\.key_data"),
    ({"loss": beside_others}, ROWS, r"\b0 scans\b.*concatenate"),
    (
        {"loss": with_statistics, "model": stateful},
        ROWS,
        r"writes\b.*2 stages .*2 micro-batches",
    ),
    ({"loss": gathering}, 48, r"rx\.gather"),
    ({"loss": centred, "data": 2, "micro_batches": 1}, 48, r"2 replicas.*without stages"),
]


@pytest.mark.parametrize(("given", "count", "said"), REFUSED)
def test_a_loss_that_cannot_be_divided_is_refused(
    given: dict[str, Any], count: int, said: str
) -> None:
    dp, state = made(**given)
    (batch,) = dp.feed(rows(count), batch_size=count)
    with refused(LossError, match=said):
        dp.step(state, batch)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("'up'", P(None, "stage")), ("", P())], ["['h']['up']", "PartitionSpec('stage', ...)"]),
        ([("", P()), *RULES], ["none of 5 parameters", "2 stages"]),
    ],
)
def test_rules_that_divide_no_layers_are_refused(rules: Any, words: list[str]) -> None:
    dp, state = made(rules=rules)
    (batch,) = dp.feed(rows(), batch_size=ROWS)
    with refused(ConfigError, *words):
        dp.step(state, batch)


def test_a_custom_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step= .* 2 stages"):
        rx.DataParallel(
            step=lambda state, batch, key: (state, {}), mesh=rx.make_mesh(stage=2), layout=RULES
        )
