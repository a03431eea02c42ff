"""Models of every kind: trained parameters, other state, and the model returned."""

import copy
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.cases import BATCH, CASES, DROPOUT_CASES
from support.tiers import only
from support.training import assert_near, train

import replicax as rx
from replicax.core.models.split import split_model
from replicax.recipes.recipe import abstract_model

X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)


@pytest.mark.parametrize("kind", ["pytree", "equinox", "linen", "nnx"])
def test_the_model_comes_back_as_the_user_gave_it_and_the_users_is_left_alone(kind: str) -> None:
    case = CASES[kind]
    model = case.model()
    arrays = jax.tree.leaves(split_model(model)[1])
    before = [np.array(array) for array in arrays]
    dp = rx.DataParallel(case.loss, optax.sgd(0.1))
    state, _ = train(dp, model, dp.feed(case.source, BATCH))
    assert_near(arrays, before, rtol=0, atol=0)
    back = dp.model(state)
    assert type(back) is type(model)
    call = {
        "pytree": lambda m: X @ m["hidden"]["kernel"],
        "equinox": lambda m: jax.vmap(m)(X),
        "linen": lambda m: m(X, train=False),
        "nnx": lambda m: (m.eval(), m(X))[1],
    }[kind]
    assert call(back).shape == call(model).shape
    assert not np.allclose(call(back), call(model))


class Pair(NamedTuple):
    w: Any
    b: Any


@pytest.mark.promise("outside.nothing-left-untrained")
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"w": np.ones(3, np.float32), "b": 0.0}, "['b']"),
        ([np.ones(3, np.float32), {"deep": (1j,)}], "[1]['deep'][0]"),
        (Pair(np.ones(3, np.float32), 0.5), ".b"),
        (rx.Stateful(Pair(np.ones(3, np.float32), 0.5), {}), ".b"),
    ],
    ids=["dict", "list", "named tuple", "stateful"],
)
def test_a_number_that_jax_would_train_is_refused_by_name(model: Any, path: str) -> None:
    with pytest.raises(rx.errors.ConfigError) as caught:
        split_model(model)
    assert path in str(caught.value)


def test_numbers_of_modules_and_of_numpy_are_no_mistake() -> None:
    module = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    for model, count in ((module, 2), ({"w": np.float64(1), "n": 3, "on": True}, 1)):
        assert len(jax.tree.leaves(split_model(model)[1])) == count


class Picky:
    """A class whose constructor checks its arguments."""

    def __init__(self, w: Any, b: Any) -> None:
        assert w.ndim == 1
        self.w, self.b = w, b


class Filling(Picky):
    """A class that replaces missing arguments."""

    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b = w, jnp.zeros(()) if b is None else b


for each in (Picky, Filling):
    jax.tree_util.register_pytree_node(
        each, lambda own: ((own.w, own.b), None), lambda _, found, each=each: each(*found)
    )


@pytest.mark.parametrize("layout", only(["fsdp"], ["replicated", "zero1", "fsdp"]))
@pytest.mark.parametrize("kind", [Picky, Filling])
def test_a_class_may_look_at_what_it_is_made_of(kind: type[Picky], layout: str) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return (batch @ model.w + model.b) ** 2

    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state, batch, key)
        return optax.apply_updates(state, jax.tree.map(lambda leaf: -0.1 * leaf, gradient)), means

    model = kind(jnp.arange(6.0), jnp.ones(()))
    built_in = rx.DataParallel(loss, optax.sgd(0.1), layout=layout)
    trained = []
    for dp in (built_in, rx.DataParallel(step=step)):
        state, _ = dp.step(dp.init(model), X)
        trained.append(dp.model(state))
        assert type(trained[-1]) is kind
    assert not np.allclose(trained[0].w, model.w)
    for name in ("w", "b"):
        one, other = (getattr(each, name) for each in trained)
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ({}, "none"),
        ({"w": 1}, "int"),
        ({"ids": np.arange(3)}, "ndarray"),
        (nnx.Dropout(0.5), "none"),
        ({"f": jnp.tanh}, "PjitFunction"),
    ],
)
def test_nothing_to_train_is_refused(model: Any, kinds: str) -> None:
    with pytest.raises(rx.errors.ConfigError, match=rf"\({kinds}\) and 0 trainable arrays"):
        split_model(model)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("mode", only(["shard_map"], ["jit", "shard_map", "pmap"]))
def test_batch_norm_moves_by_the_global_batch(kind: str, mode: str) -> None:
    case = CASES[kind]
    state, reference = (
        train(dp, case.model(), dp.feed(case.source, BATCH))[0]
        for dp in (
            rx.DataParallel(case.loss, optax.sgd(0.1), mode=each) for each in (mode, "single")
        )
    )
    initial = split_model(case.model())[2]
    for found, expected, start in zip(
        *(
            jax.tree.leaves(rest)
            for rest in map(_statistics, (state.extras, reference.extras, initial))
        ),
        strict=True,
    ):
        assert not np.allclose(expected, start)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def _statistics(extras: Any) -> Any:
    return extras["norm"] if "norm" in extras else extras["batch_stats"]


class Counter(nnx.Module):
    """Writes a mean of its rows."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen.set_value(jnp.mean(x))
        return self.weight * x


class LinenCounter(nn.Module):
    """Counter in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, ())
        seen = self.variable("batch_stats", "seen", jnp.zeros, ())
        if self.is_mutable_collection("batch_stats"):
            seen.value = jnp.mean(x)
        return weight * x


COUNTERS = {
    "nnx": Counter,
    "linen": lambda: LinenCounter().bind(LinenCounter().init(jax.random.key(0), jnp.zeros(1))),
}


@pytest.mark.parametrize("kind", COUNTERS)
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_statistics_that_would_differ_by_replica_are_refused(kind: str, mode: str) -> None:
    dp = rx.DataParallel(lambda m, b, k: m(b["x"]), optax.sgd(0.1), mode=mode)
    with pytest.raises(rx.errors.ConfigError, match="use mode='jit'"):
        dp.step(dp.init(COUNTERS[kind]()), {"x": np.arange(8, dtype=np.float32)})


@pytest.mark.parametrize("kind", COUNTERS)
def test_statistics_of_any_kind_are_global_in_jit(kind: str) -> None:
    dp = rx.DataParallel(lambda m, b, k: m(b["x"]), optax.sgd(0.1), mode="jit")
    state, _ = dp.step(dp.init(COUNTERS[kind]()), {"x": np.arange(8, dtype=np.float32)})
    assert [float(leaf) for leaf in jax.tree.leaves(state.extras)] == [3.5]


@pytest.mark.parametrize("mode", only(["shard_map"], ["jit", "shard_map", "pmap"]))
def test_dropout_masks_depend_on_seed_and_step_alone(mode: str) -> None:
    case = DROPOUT_CASES["nnx"]
    dp = rx.DataParallel(case.loss, optax.sgd(0.0), mode=mode)

    def losses(seed: int) -> list[float]:
        state = dp.init(case.model(), seed=seed)
        found = []
        for batch in [next(iter(dp.feed(case.source, BATCH)))] * 2:
            state, metrics = dp.step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    assert losses(0) == losses(0)
    assert losses(0)[0] != losses(0)[1]
    assert losses(0) != losses(1)


def test_replicas_draw_different_masks() -> None:
    """All rows are equal, so that only the masks differ between replicas."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return model["w"] * batch["x"] * jax.random.normal(key, batch["x"].shape), {}

    for mode in ("shard_map", "pmap"):
        dp = rx.DataParallel(loss, optax.sgd(1.0), mode=mode)
        state = dp.init({"w": jnp.zeros(())})
        state, _ = dp.step(state, {"x": np.ones(8, np.float32)})
        shared = jax.random.fold_in(jax.random.key(jnp.uint32(0)), 0)
        draws = [
            jax.random.normal(jax.random.fold_in(jax.random.fold_in(shared, replica), 0), (1,))
            for replica in range(8)
        ]
        np.testing.assert_allclose(state.params["w"], -np.mean(draws), rtol=1e-5)


def equinox_loss(model: Any, batch: Any, key: Any) -> Any:
    keys = None if key is None else jax.random.split(key, len(batch["x"]))
    return jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys)


def equinox_model(dropout: float) -> Any:
    linear = eqx.nn.Linear(6, 1, key=jax.random.key(0))
    return eqx.nn.Sequential([linear, eqx.nn.Dropout(dropout)])


@pytest.mark.parametrize(
    ("dropped", "whole", "loss", "source"),
    [
        (DROPOUT_CASES["nnx"].model, CASES["nnx"].model, CASES["nnx"].loss, CASES["nnx"].source),
        (lambda: equinox_model(0.5), lambda: equinox_model(0.0), equinox_loss, {"x": X}),
    ],
    ids=["nnx", "equinox"],
)
def test_evaluation_is_that_of_a_model_without_dropout(
    dropped: Any, whole: Any, loss: Any, source: Any
) -> None:
    found = []
    for model in (dropped(), whole()):
        dp = rx.DataParallel(loss, optax.sgd(0.1))
        found.append(dp.evaluate(dp.init(model), dp.feed(source, 8)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_evaluation_uses_the_statistics_it_has(kind: str) -> None:
    """Single rows give what all rows give: nothing comes from the batch."""
    case = CASES[kind]
    dp = rx.DataParallel(case.loss, optax.sgd(0.1), mode="single")
    state = dp.init(case.model())
    one, all_rows = (dp.evaluate(state, dp.feed(case.source, size)) for size in (1, 51))
    assert one["loss"] == pytest.approx(all_rows["loss"], rel=1e-6)


def test_one_object_trains_one_structure() -> None:
    dp = rx.DataParallel(CASES["pytree"].loss, optax.sgd(0.1))
    dp.init(CASES["pytree"].model())
    dp.init(CASES["pytree"].model())
    other = copy.deepcopy(CASES["pytree"].model())
    other["more"] = jnp.ones(2)
    with pytest.raises(rx.errors.ConfigError, match="structure"):
        dp.init(other)


LARGE = 2**20
LARGE_MODELS = {
    "pytree": lambda: {"w": jax.random.normal(jax.random.key(0), (LARGE, LARGE))},
    "equinox": lambda: eqx.nn.Linear(LARGE, LARGE, key=jax.random.key(0)),
    "linen": lambda: (dense := nn.Dense(LARGE)).bind(
        dense.init(jax.random.key(0), jnp.zeros((1, LARGE)))
    ),
    "nnx": lambda: nnx.Linear(LARGE, LARGE, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("kind", LARGE_MODELS)
def test_an_abstract_model_takes_no_memory(kind: str) -> None:
    """The model has 4 TiB, more than any host."""
    params = split_model(abstract_model(LARGE_MODELS[kind]))[1]
    assert max(leaf.size for leaf in jax.tree.leaves(params)) == LARGE**2


def test_a_model_that_looks_at_values_is_really_made() -> None:
    def make(key: jax.Array) -> Any:
        weights = jax.random.normal(key, (3,))
        return {"w": weights if weights.sum() > 0 else -weights}

    made = abstract_model(make, jax.random.key(0))
    assert float(made["w"].sum()) > 0


def test_an_error_of_the_model_is_not_hidden() -> None:
    reason = "no such width"

    def make() -> Any:
        raise ValueError(reason)

    with pytest.raises(ValueError, match=reason):
        abstract_model(make)


@pytest.mark.parametrize(
    "value", [np.arange(3) + 2**33, np.full(3, 2**40, np.uint64), np.full(3, 1e300)], ids=str
)
def test_a_number_that_does_not_fit_into_32_bits_is_refused_by_name(value: np.ndarray) -> None:
    dp = rx.DataParallel(lambda model, batch, key: batch["x"], optax.sgd(0.1), mode="single")
    model = {"w": np.ones(3, np.float32)}
    own = rx.DataParallel(step=lambda state, batch, key: (state, {}), mode="single")
    for given, to in ((model | {"t": value}, dp), (rx.Stateful(model, {"t": value}), dp)):
        with pytest.raises(
            rx.errors.DataError, match=r"'t'.*64 (8589934592|1099511627776|1e\+300);"
        ):
            to.init(given)
    with pytest.raises(rx.errors.DataError, match="'t'"):
        own.init(model | {"t": value})
    fits = np.array([1, 2**31 - 1, -(2**31)])
    np.testing.assert_array_equal(own.model(own.init(model | {"t": fits}))["t"], fits)
