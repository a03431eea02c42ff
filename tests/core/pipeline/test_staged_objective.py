"""Pipeline stages compute the numbers of one device, for every schedule and kind of model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from support.agreement import largest_difference
from support.staged import (
    LAYERS,
    ROWS,
    RULES,
    TENSOR,
    TOKENS,
    WIDTH,
    head,
    layer,
    made,
    model,
    rows,
    step_sums,
    sums_by_key,
)
from support.tiers import EXHAUSTIVE, exhaustive, only

import replicax as rx
from replicax.core.models.definition import CallContext
from replicax.core.placement.pipeline_schedules import SCHEDULES
from replicax.core.step.base import StepSums
from replicax.core.step.loss import WeightedSum
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2


@functools.cache
def reference() -> StepSums:
    """The sums of one step on one device."""
    return step_sums(stage=1)


CASES = [
    (schedule, shape, micro_batches)
    for schedule in SCHEDULES
    for shape in ((1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 1, 4), (1, 2, 2), (2, 2, 2))
    for micro_batches in (1, 3, 8)
    if schedule == "1f1b" or micro_batches == 3
]


@pytest.mark.parametrize(
    ("schedule", "shape", "micro_batches"),
    only([("1f1b", (2, 1, 4), 3), ("1f1b", (1, 2, 2), 3), ("gpipe", (2, 1, 2), 3)], CASES),
)
def test_the_sums_of_stages_are_those_of_one_device(
    schedule: str, shape: tuple[int, int, int], micro_batches: int
) -> None:
    data, tensor, stage = shape
    found = step_sums(
        schedule=schedule,
        data=data,
        tensor=tensor,
        stage=stage,
        rules=TENSOR if tensor > 1 else RULES,
        micro_batches=micro_batches,
    )
    expected = reference()
    assert set(found.weighted) == {"loss", "largest"}
    assert largest_difference(found, expected)[0] < 2e-6
    assert found.weight == expected.weight


@pytest.mark.parametrize(
    "rules",
    [exhaustive(RULES), exhaustive([("'(up|down)'", P("stage", "fsdp")), *RULES])],
    ids=["whole", "split"],
)
def test_rows_may_be_split_over_a_second_axis(rules: Any) -> None:
    found = step_sums(rules=rules, data=2, fsdp=2, micro_batches=2)
    assert largest_difference(found, reference())[0] < 2e-6


def trained(steps: int = 5, **settings: Any) -> tuple[Any, list[float], dict[str, float]]:
    """The model after some steps, its losses, and the means of an evaluation."""
    dp, state = made(**settings)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in dp.feed(rows(), batch_size=16, epoch=len(losses)):  # the last one of 3 rows
            state, metrics = dp.step(state, batch)
            losses.append(float(metrics["loss"]))
    return jax.device_get(dp.model(state)), losses, dp.evaluate(state, dp.feed(rows(), 16))


@pytest.mark.parametrize(
    "shape",
    [
        {"data": 2, "micro_batches": 3},
        exhaustive({"stage": 4, "micro_batches": 8}),
        exhaustive({"data": 2, "tensor": 2, "rules": TENSOR}),
    ],
)
def test_five_steps_of_adamw_give_the_numbers_of_one_device(shape: dict[str, Any]) -> None:
    params, losses, means = trained(**shape)
    expected, expected_losses, expected_means = trained(stage=1)
    assert largest_difference(params, expected)[0] < 1e-6
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert means == pytest.approx(expected_means, rel=1e-6)
    assert means["rows"] == ROWS


def test_a_frozen_parameter_has_no_gradient() -> None:
    found = step_sums(trainable=r"'(up|scale)'", micro_batches=3)
    expected = step_sums(stage=1, trainable=r"'(up|scale)'")
    assert len(jax.tree.leaves(found.gradient)) == 2
    assert largest_difference(found, expected)[0] < 2e-6


@pytest.mark.parametrize(
    ("precision", "bound"), [("bfloat16", 0.05), exhaustive(("float16", 0.01))]
)
def test_a_narrow_dtype_rounds_as_it_does_on_one_device(precision: str, bound: float) -> None:
    found = step_sums(precision=precision, micro_batches=3)
    expected = step_sums(stage=1, precision=precision)
    assert largest_difference(found, expected)[0] < bound
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))


def test_the_scale_of_a_float16_loss_multiplies_the_gradient_alone() -> None:
    dp, state = made(micro_batches=2)
    (batch,) = dp.feed(rows(), batch_size=ROWS)
    objective = dp.program(state).split_objective

    @jax.jit
    def sums(scale: jax.Array) -> StepSums:
        return objective.step_sums(state.params, state.extras, batch, CallContext(scale=scale))[0]

    one, eight = jax.device_get((sums(jnp.float32(1)), sums(jnp.float32(8))))
    eightfold = jax.tree.map(lambda leaf: 8 * leaf, one.gradient)
    assert largest_difference(eight.gradient, eightfold)[0] == 0
    assert largest_difference(eight.weighted, one.weighted)[0] == 0


@pytest.mark.parametrize("remat", [False, exhaustive(True)])
def test_random_numbers_follow_from_the_step_the_replica_and_the_micro_batch(remat: bool) -> None:
    """Every row and layer draws its own number: the metric is their variance."""

    def noisy(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
        block, key = given
        noise = jax.random.normal(key, x.shape[:1])
        return layer(x, block)[0] + noise[:, None, None], None

    def dropping(model: Any, batch: Any, key: Any) -> Any:
        keys = jax.random.split(key, LAYERS)
        body = jax.checkpoint(noisy) if remat else noisy
        x, _ = lax.scan(body, jnp.zeros((len(batch["tokens"]), TOKENS, WIDTH)), (model["h"], keys))
        return head(model, x, batch)[0], {"drawn": jax.random.normal(key, (len(x),))}

    sums = sums_by_key(dropping, data=2, micro_batches=3)
    first, again, other = map(sums, (0, 0, 1))
    assert largest_difference(first, again)[0] == 0
    assert largest_difference(first.gradient["h"], other.gradient["h"])[0] > 0.01
    # 6 micro-batches of 9 rows and 3 of padding: as many keys.
    keys = [
        jax.random.fold_in(jax.random.fold_in(jax.random.key(0), replica), number)
        for replica in range(2)
        for number in range(3)
    ]
    drawn = np.concatenate([jax.random.normal(key, (9,)) for key in keys])
    total = first.weighted["drawn"].total
    # Rows 51 to 53 are padding: the last of each of the second replica's micro-batches.
    drawn[35::9] = 0
    assert total == pytest.approx(drawn.sum(), abs=1e-4)


def test_what_a_loss_asks_for_inside_of_a_step_is_that_of_its_micro_batch() -> None:
    def asking(model: Any, batch: Any, key: Any) -> Any:
        real = rx.row_weights(batch["tokens"])
        x, _ = lax.scan(layer, model["embedding"][batch["tokens"]], model["h"])
        value, _ = head(model, x, batch)
        by_step = value.values * (1 + rx.step_number()) * batch["factor"]
        return rx.Weighted(by_step, value.weights), {"real": real}

    source = {**rows(), "factor": rx.Replicated(0.5)}
    found = step_sums(asking, source=source, data=2, micro_batches=3)
    assert largest_difference(found, step_sums(asking, source=source, stage=1))[0] < 2e-6
    assert found.weighted["real"] == WeightedSum(ROWS, ROWS)


def test_masks_counters_and_stacks_that_are_whole_reach_each_layer() -> None:
    """A mask as a scan constant, integers in the carry, and whole stacks by layer."""

    def mixed(model: Any, batch: Any, key: Any) -> Any:
        mask = (batch["next"] % 2)[..., None]

        def step(carry: Any, given: Any) -> Any:
            (x, count, penalty, turn), (block, gain, number) = carry, given
            x = layer(x, block)[0] * gain + mask * number * turn
            penalty += jnp.mean(block["up"] ** 2)
            return (x, count + number, penalty, turn + 1), jnp.sum(x)  # by layer, and unread

        per_layer = (model["h"], model["gain"], jnp.arange(LAYERS))
        start = (model["embedding"][batch["tokens"]], batch["tokens"][:, 0], 0.0, 1)
        (x, count, penalty, _), _ = jax.jit(lambda *given: lax.scan(jax.checkpoint(step), *given))(
            start, per_layer
        )
        value, _ = head(model, x, batch)
        metrics = {"count": count.astype(jnp.float32)}
        return rx.Weighted(value.values + penalty, value.weights), metrics

    def with_gain() -> Any:
        return {**model(), "gain": jnp.linspace(0.5, 1.5, LAYERS)}

    found = step_sums(mixed, with_gain, data=2, micro_batches=3)
    assert largest_difference(found, step_sums(mixed, with_gain, stage=1))[0] < 2e-6


@EXHAUSTIVE
def test_gpt2_trains_in_stages() -> None:
    recipe = GPT2(layers=4, heads=2, width=16, context=12)
    shape = transformer.Shape(4, recipe.heads, recipe.width, recipe.context, vocab_size=32)
    random = np.random.default_rng(0)
    source = {
        "tokens": random.integers(0, 32, (ROWS, 13)).astype(np.int32),
        "length": random.integers(1, 13, ROWS).astype(np.int32),
        "bytes": random.integers(1, 40, ROWS).astype(np.int32),
    }
    init = lambda: transformer.init(shape, jax.random.key(1))  # noqa: E731
    given: dict[str, Any] = {"loss": recipe.loss, "model": init, "source": source}
    found = step_sums(**given, data=2, stage=4, micro_batches=4)
    assert largest_difference(found, step_sums(**given, stage=1))[0] < 1e-5


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None


class LinenNetwork(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        by_layer = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(LinenLayer, length=LAYERS, **by_layer)(name="h")(x, None)
        return nn.Dense(1)(x)


class NNXLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.dense = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.dense(self.norm(x)))


class NNXNetwork(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.h = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NNXLayer))(rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.last(layers(x, self.h))


class EquinoxNetwork(eqx.Module):
    h: eqx.nn.MLP
    last: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), LAYERS)
        mlp = lambda key: eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)  # noqa: E731
        self.h, self.last = eqx.filter_vmap(mlp)(keys), eqx.nn.Linear(WIDTH, 1, key=keys[0])

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.h, eqx.is_array)
        x, _ = lax.scan(lambda x, own: (x + eqx.combine(own, static)(x), None), x, arrays)
        return self.last(x)


def linen_variables() -> Any:
    return LinenNetwork().init(jax.random.key(0), jnp.zeros((1, WIDTH)))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], jax.Array]]] = {
    "linen": (linen_variables, LinenNetwork().apply),
    "nnx": (NNXNetwork, lambda model, x: model(x)),
    "equinox": (EquinoxNetwork, lambda model, x: jax.vmap(model)(x)),
}


@pytest.mark.parametrize("kind", [exhaustive(kind) for kind in KINDS])
def test_layers_of_every_kind_of_model_are_found(kind: str) -> None:
    create, apply = KINDS[kind]
    given: dict[str, Any] = {
        "loss": lambda model, batch, key: jnp.mean(apply(model, batch["x"]) ** 2, axis=-1),
        "model": create,
        "source": {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)},
    }
    found = step_sums(**given, rules=[(r"\bh\b", P("stage")), ("", P())], stage=4)
    assert largest_difference(found, step_sums(**given, stage=1))[0] < 1e-5


def memory(schedule: str, micro_batches: int) -> int:
    """Return the extra bytes of the gradient with so many micro-batches of as many rows."""
    dp, state = made(stage=4, micro_batches=micro_batches)
    objective = dataclasses.replace(dp.program(state).split_objective, schedule=schedule)
    (batch,) = dp.feed(rows(32 * micro_batches), batch_size=32 * micro_batches)

    @jax.jit
    def sums(state: Any, batch: Any) -> StepSums:
        context = CallContext(jax.random.key(0))
        return objective.step_sums(state.params, state.extras, batch, context)[0]

    analysis = sums.lower(state, batch).compile().memory_analysis()
    data = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    assert analysis is not None
    return analysis.temp_size_in_bytes - 2 * data


@EXHAUSTIVE
def test_what_1f1b_keeps_does_not_grow_with_the_micro_batches() -> None:
    assert memory("1f1b", 16) < 1.01 * memory("1f1b", 8)
    assert memory("gpipe", 16) > 1.5 * memory("gpipe", 8)
