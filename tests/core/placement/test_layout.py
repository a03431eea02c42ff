"""Layouts: the sharding of each array of the state, and equal numbers in all layouts."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.figures import refused
from support.small_steps import SMALL_STEPS
from support.tiers import exhaustive
from support.training import normals

import replicax as rx
from replicax.analysis.schedule import Schedule, read_schedule
from replicax.core.placement.layout import as_layout
from replicax.errors import ConfigError

RULES = [
    (r"\['w1'\]", P(None, "model")),
    (r"\['w2'\]", P("model", None)),
    ("b1", P("model")),
    ("", P()),
]


def model() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w1": jax.random.normal(keys[0], (8, 16)) / 3,
        "b1": jnp.zeros(16),
        "w2": jax.random.normal(keys[1], (16, 3)) / 4,
        "scale": jnp.float32(1),
    }


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ model["w1"] + model["b1"])
    return jnp.mean((hidden @ model["w2"] * model["scale"] - batch["y"]) ** 2, axis=-1)


def batch() -> dict[str, np.ndarray]:
    draw = normals(0)
    return {"x": draw(27, 8), "y": draw(27, 3)}


def specs(layout: Any, mesh: Any = None) -> tuple[dict[str, P], dict[str, P]]:
    """Return the specs of the parameters and of Adam's first moment."""
    dp = rx.DataParallel(loss, optax.adam(0.1), mesh=mesh, layout=layout)
    state = jax.eval_shape(lambda: _create(model()))
    shardings = dp.layout.shardings(state, dp.mesh)
    leaves = jax.tree_util.tree_leaves_with_path(shardings.opt_state)
    moment = {str(path[-1].key): leaf.spec for path, leaf in leaves if ".mu" in _text(path)}
    return {name: leaf.spec for name, leaf in shardings.params.items()}, moment


def _create(params: Any) -> rx.TrainState:
    return rx.TrainState(jnp.int32(0), params, optax.adam(0.1).init(params), {}, jnp.uint32(0))


def _text(path: Any) -> str:
    return jax.tree_util.keystr(path)


WHOLE = {"w1": P(), "b1": P(), "w2": P(), "scale": P()}
# The largest dim that 8 divides; a scalar has none.
SPLIT = {"w1": P(None, "data"), "b1": P("data"), "w2": P("data", None), "scale": P()}


@pytest.mark.parametrize(
    ("layout", "params", "moment"),
    [("replicated", WHOLE, WHOLE), ("zero1", WHOLE, SPLIT), ("fsdp", SPLIT, SPLIT)],
)
def test_a_named_layout_splits_what_it_says(
    layout: str, params: dict[str, P], moment: dict[str, P]
) -> None:
    assert specs(layout) == (params, moment)


def test_a_dim_that_the_replicas_do_not_divide_stays_whole() -> None:
    params, _ = specs("fsdp", rx.make_mesh(data=3))
    assert params == {"w1": P(), "b1": P(), "w2": P(None, "data"), "scale": P()}


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 4, 4), P(None, "data", None)),  # not between the layers, though there are more
        ((8, 3, 4), P(None, None, "data")),
        ((8, 3, 3), P("data", None, None)),  # where no layer can be split
        ((8, 4), P("data", None)),  # no stack
    ],
)
def test_each_layer_of_a_stack_is_split(shape: tuple[int, ...], spec: P) -> None:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=rx.make_mesh(data=4), layout="fsdp")
    params = dp.abstract_state({"stack": jnp.zeros(shape)}).params
    assert params["stack"].sharding.spec == spec


def test_rules_are_found_in_the_path_and_the_first_decides() -> None:
    params, moment = specs([*RULES[:-1], ("w1", P("data")), ("", P())], rx.make_mesh(model=2))
    expected = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "scale": P()}
    assert params == moment == expected


@pytest.mark.parametrize("layout", ["replicated", "zero1", "fsdp", RULES])
def test_a_layout_that_splits_nothing_is_whole(layout: Any) -> None:
    assert as_layout(layout).is_whole == (layout == "replicated")


def test_a_rule_may_split_a_dim_over_two_axes() -> None:
    params, _ = specs([("w1", P(None, ("data", "model"))), ("", P())], rx.make_mesh(model=2))
    assert params["w1"] == P(None, ("data", "model"))


def test_a_rule_holds_for_the_optimizers_copies_and_leaves_scalars_whole() -> None:
    params, moment = specs([(r"^\['(w1|scale)'\]$", P("data")), ("", P())])
    assert params["scale"] == P()
    assert params["w1"] == moment["w1"] == P("data")


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("w1", P("tensor"))], ["['w1']", "'tensor'", "data, model, stage"]),
        ([("w2", P(None, "data"))], ["['w2']", "3", "8", "divide"]),
        ([("b1", P(None, "data"))], ["['b1']"]),  # more dims than the parameter has
        ([("w1", P("data", "data"))], ["['w1']", "data"]),  # one axis twice
        ([("(", P("data"))], ["'('"]),  # no regex
        ([("no such path", P("data"))], ["no such path"]),  # nothing silent
        ([("w1", "data")], ["'data'"]),  # no PartitionSpec
        (5, ["5", "replicated"]),
        (None, ["None", "replicated"]),
    ],
    ids=["axis", "divide", "dims", "twice", "regex", "unused", "spec", "number", "none"],
)
def test_a_rule_that_cannot_hold_is_refused(rules: Any, words: list[str]) -> None:
    with refused(ConfigError, *words):
        rx.DataParallel(loss, optax.adam(0.1), layout=rules).init(model())


HOLDS = {"shard_map": ["zero1", "fsdp"], "exact": ["zero1"]}


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        (mode, layout)
        for mode in ("single", "shard_map", "pmap", "exact")
        for layout in ("zero1", "fsdp", RULES)
        if layout not in HOLDS.get(mode, [])
    ],
)
def test_a_mode_that_cannot_split_the_state_is_refused(mode: str, layout: Any) -> None:
    with pytest.raises(ConfigError, match=f"mode='{mode}'.*use mode='jit'"):
        rx.DataParallel(loss, optax.adam(0.1), layout=layout, mode=mode)


@pytest.mark.parametrize(
    ("axes", "layout", "refused"),
    [
        ({"stage": 2}, "replicated", "stage"),
        ({"stage": 2}, RULES, "stage"),
        ({"model": 2}, "fsdp", "model"),
        ({"model": 2}, [("w1", P("data"))], "model"),
    ],
)
def test_an_axis_over_which_nothing_is_split_is_refused(
    axes: dict[str, int], layout: Any, refused: str
) -> None:
    with pytest.raises(ConfigError, match=f"2 devices along '{refused}'"):
        rx.DataParallel(loss, optax.adam(0.1), layout=layout, mesh=rx.make_mesh(**axes))


@cache
def scheduled(name: str, layout: str, devices: int) -> tuple[Schedule, Any]:
    """Return a compiled step of 16 rows, fewer than a layer has units, and its parameters."""
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    step = SMALL_STEPS[name](16, mesh=mesh, layout=layout)
    text = step.dp.lower(step.model, step.batch).compile().as_text() or ""
    return read_schedule(text), step.dp.abstract_state(step.model).params


GPT2 = exhaustive(("gpt2", "fsdp"))
# The embedding is tied to the last layer, and mode `jit` reduces both parts of its gradient.
TWICE = {"mlp": 0, "gpt2": 4 * 256 * 128}


@pytest.mark.parametrize(("name", "layout"), [("mlp", "zero1"), ("mlp", "fsdp"), GPT2])
def test_a_split_layout_gathers_and_reduces_once_and_sends_nothing_else(
    name: str, layout: str
) -> None:
    schedule, params = scheduled(name, layout, 8)
    sent = dict.fromkeys(("all-gather", "all-reduce"), 0)  # XLA's CPU has no reduce-scatter
    for each in schedule.collectives:
        sent[each.kind] += each.runs * each.bytes
    leaves = jax.tree.leaves(params)
    size = sum(4 * leaf.size for leaf in leaves)
    whole = sum(4 * leaf.size for leaf in leaves if leaf.sharding.is_fully_replicated)
    if layout == "fsdp":  # forward, and again backward where the gradient needs it
        assert size - whole < sent["all-gather"] <= 2 * (size - whole)
    else:
        assert 0 < sent["all-gather"] <= size
    metrics = 64  # bytes, at most
    assert size < sent["all-reduce"] <= size + TWICE[name] + metrics


@pytest.mark.parametrize(
    ("name", "layout"), [("mlp", "replicated"), ("mlp", "zero1"), ("mlp", "fsdp"), GPT2]
)
def test_each_of_8_devices_computes_an_eighth(name: str, layout: str) -> None:
    one, _ = scheduled(name, layout, 1)
    eight, _ = scheduled(name, layout, 8)
    # On one device XLA unrolls the loop of GPT-2's one layer here, and keeps the scores of its
    # attention for the backward pass, which computes them again where it gathers the biases.
    # 16 rows, 2 heads of 64 dims, 4 blocks of 32 queries, each of which sees 32 keys more.
    scores = {"mlp": 0, "gpt2": 2 * 16 * 2 * 64 * 32 * (32 + 64 + 96 + 128)}[name]
    assert 8 * eight.flops - one.flops in (0, scores)
    assert one.flops > 0
