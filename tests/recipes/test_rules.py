"""Rules of recipes: the numbers of one device, whatever shares a layer, and what that sends."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.agreement import in_float64
from support.tiers import only

import replicax as rx
from replicax.analysis.compiled import Collectives, inspect
from replicax.cli.step_options import StepOptions
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.mlp import MLP

ROWS, CONTEXT, STEPS = 16, 16, 5
SIZES = {"layers": 2, "heads": 4, "width": 16, "context": CONTEXT}


def text() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    length = random.integers(1, CONTEXT + 1, ROWS).astype(np.int32)
    tokens = random.integers(0, 257, (ROWS, CONTEXT + 1)).astype(np.uint16)
    return {"tokens": tokens, "length": length, "bytes": length}


def network(key: jax.Array) -> transformer.Params:
    return transformer.init(transformer.Shape(**SIZES, vocab_size=257), key)


SMALL_MLP = MLP(layers=3, hidden=16, rows=ROWS)
SUBJECTS: dict[str, tuple[Any, Any, Any]] = {
    "gpt2": (GPT2(**SIZES), network, text),
    "mlp": (SMALL_MLP, SMALL_MLP.model, SMALL_MLP.train_source),
}


@pytest.fixture(scope="module", params=only(["mlp"], SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Any:
    """A recipe, its model, a batch, and losses and parameters after five steps on one device."""
    recipe, make, batch = SUBJECTS[request.param]
    model, rows = make(jax.random.key(0)), batch()
    return recipe, model, rows, trained(recipe, model, rows, mode="single")


def trained(recipe: Any, model: Any, batch: Any, **settings: Any) -> tuple[list[float], Any]:
    """Train GPT-2 in float64: how float32 rounds its sums in another order differs by processor."""
    with jax.enable_x64(True):
        dp = rx.DataParallel(recipe.loss, optax.adamw(1e-3), **settings)
        state, losses = dp.init(in_float64(model) if isinstance(model, dict) else model), []
        for _ in range(STEPS):
            state, metrics = dp.step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, jax.device_get(state.params)


@pytest.mark.parametrize(
    ("layout", "model_parallel", "devices"),
    only(
        [("fsdp", 2, 8)],
        [
            *(("replicated", 2, 2), ("replicated", 4, 4), ("replicated", 2, 8)),
            *(("zero1", 2, 2), ("zero1", 2, 4), ("zero1", 4, 8)),
            *(("fsdp", 2, 2), ("fsdp", 4, 4), ("fsdp", 2, 8)),
        ],  # all pairs, not all products
    ),
)
def test_devices_that_share_a_layer_compute_what_one_does(
    layout: str, model_parallel: int, devices: int, subject: Any
) -> None:
    recipe, model, batch, (losses, params) = subject
    options = StepOptions(layout=layout, model_parallel=model_parallel)
    settings = {"mesh": options.mesh(devices), "layout": options.layout_of(recipe)}
    found = trained(recipe, model, batch, **settings)
    of_loss, of_leaves = (1e-12, 1e-12) if isinstance(model, dict) else (3.5e-7, 1e-6)
    np.testing.assert_allclose(found[0], losses, rtol=of_loss, atol=0)
    for leaf, wanted in zip(*map(jax.tree.leaves, (found[1], params)), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=0, atol=of_leaves)


SHARDS = {
    "gpt2": {
        "['attn']['c_attn']['weight']": (1, 16, 3, 8),
        "['attn']['c_attn']['bias']": (1, 3, 8),
        "['attn']['c_proj']['weight']": (1, 8, 16),
        "['attn']['c_proj']['bias']": (1, 16),
        "['ln_1']['weight']": (1, 16),
        "['ln_1']['bias']": (1, 16),
        "['ln_2']['weight']": (1, 16),
        "['ln_2']['bias']": (1, 16),
        "['mlp']['c_fc']['weight']": (1, 16, 32),
        "['mlp']['c_fc']['bias']": (1, 32),
        "['mlp']['c_proj']['weight']": (1, 32, 16),
        "['mlp']['c_proj']['bias']": (1, 16),
    },
    "mlp": {"['kernel']": (1, 16, 8), "['bias']": (1, 8)},
}
"""Shard shapes of a stack of two layers; model=2, stage=2."""


@pytest.mark.parametrize("name", SUBJECTS)
def test_stacks_are_split_and_all_else_is_whole(name: str) -> None:
    recipe, make, _ = SUBJECTS[name]
    mesh, layout = rx.make_mesh(model=2, stage=2), rx.layout(rules=recipe.rules())
    dp = rx.DataParallel(recipe.loss, optax.adamw(1e-3), mesh=mesh, layout=layout)
    params = dp.abstract_state(make(jax.random.key(0))).params
    stack = params.pop("h" if name == "gpt2" else "stack")
    shards = {
        jax.tree_util.keystr(path): leaf.sharding.shard_shape(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(stack)
    }
    assert shards == SHARDS[name]
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))


def test_a_block_sends_its_activations_twice_forward_and_twice_back() -> None:
    """Megatron-LM's traffic: heads and hidden dims need no other device until they are added."""
    recipe, make, batch = SUBJECTS["gpt2"]
    mesh = rx.make_mesh(1, model=2, devices=jax.devices()[:2])
    layout = rx.layout(rules=recipe.rules())
    dp = rx.DataParallel(recipe.loss, optax.sgd(0.1), mesh=mesh, layout=layout)
    (found,) = inspect(dp.lower(make(jax.random.key(0)), batch()).compile()).collectives
    blocks = 4 * recipe.layers
    assert found == Collectives("all-reduce", blocks, blocks * 4 * ROWS * CONTEXT * recipe.width)
