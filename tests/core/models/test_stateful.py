"""Functional models that return their state: `rx.Stateful` and `rx.NewState`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.figures import refused
from support.resumable import bits
from support.tiers import exhaustive, only
from support.training import assert_near, epochs

import replicax as rx

BATCH = 32
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
PLACES = [("single", 1), ("jit", 1), ("jit", 4), ("shard_map", 1), ("pmap", 1)]
GATHERED = [("single", 1), ("jit", 4), ("shard_map", 4), ("pmap", 4), ("exact", 1), ("exact", 4)]


def rows(count: int = 64) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :1])}


class Network(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.SpectralNorm

    def __init__(self, key: Any) -> None:
        first, last, spectral = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(4, 8, key=first)
        self.norm = eqx.nn.BatchNorm(8, "rows", mode="batch")
        self.last = eqx.nn.SpectralNorm(eqx.nn.Linear(8, 1, key=last), "weight", key=spectral)

    def __call__(self, x: Any, state: Any) -> Any:
        hidden, state = self.norm(self.first(x), state)
        return self.last(jnp.tanh(hidden), state)


def equinox_loss(model: Any, batch: Any, key: Any) -> Any:
    found, state = jax.vmap(model.model, (0, None), (0, None), axis_name="rows")(
        batch["x"], model.state
    )
    error = found - batch["y"]
    return rx.NewState((jnp.sum(error**2, -1), {"size": jnp.abs(error[:, 0])}), state)


def codes_loss(model: Any, batch: Any, key: Any) -> Any:
    """Distance to the nearest code; codes are updated from the rows of the whole batch."""
    hidden, codes = batch["x"] @ model.model["w"], model.state["codes"]

    def nearest(hidden: Any) -> Any:
        return jnp.argmin(jnp.sum((hidden[:, None] - codes) ** 2, -1), -1)

    everyone, real = rx.gather((jax.lax.stop_gradient(hidden), rx.row_weights(hidden)))
    chosen = jax.nn.one_hot(nearest(everyone), len(codes)) * real[:, None]
    count = jnp.sum(chosen, 0)[:, None]
    mean = jnp.where(count > 0, chosen.T @ everyone / jnp.maximum(count, 1), codes)
    state = {"codes": 0.9 * codes + 0.1 * mean, "steps": model.state["steps"] + 1}
    return rx.NewState(jnp.sum((hidden - codes[nearest(hidden)]) ** 2, -1), state)


def codebook() -> rx.Stateful:
    random = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return rx.Stateful({"w": draw(4, 3)}, {"codes": draw(5, 3), "steps": jnp.int32(0)})


def spectral_loss(model: Any, batch: Any, key: Any) -> Any:
    """Divide by the largest singular value, as found by one more step of a power iteration."""
    w, state = model.model["w"], model.state
    left = jax.lax.stop_gradient(w.T @ (w @ state["left"]))
    left = left / jnp.linalg.norm(left)
    found = batch["x"] @ w / jnp.linalg.norm(w @ left)
    values = jnp.sum((found - batch["y"]) ** 2, -1)
    return rx.NewState(values, {"left": left, "steps": state["steps"] + 1})


def spectral() -> rx.Stateful:
    return rx.Stateful(codebook().model, {"left": jnp.ones(3), "steps": jnp.int32(0)})


def network() -> rx.Stateful:
    return rx.Stateful(*eqx.nn.make_with_state(Network)(jax.random.key(0)))


def parallel(loss: Any, mode: str, devices: int, **settings: Any) -> rx.DataParallel:
    return training.parallel(loss, OPTIMIZER, mode=mode, devices=devices, **settings)


def trained(dp: rx.DataParallel, model: Any, count: int = 64) -> tuple[Any, list[float]]:
    state, told = training.train(dp, model, epochs(dp, rows(count), BATCH, 2))
    return state, training.losses(told)


def arrays(model: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(model, eqx.is_array))


LOSSES = {network: equinox_loss, codebook: codes_loss, spectral: spectral_loss}


@functools.cache
def by_hand(make: Callable[[], rx.Stateful]) -> tuple[Any, list[float]]:
    """Train in plain JAX on one device; returns the arrays of the model, and the losses."""
    loss, model = LOSSES[make], make()
    params, rest = eqx.partition(model.model, eqx.is_inexact_array)

    @jax.jit
    def step(params: Any, moments: Any, state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            written = loss(rx.Stateful(eqx.combine(params, rest), state), batch, None)
            values = written.values[0] if isinstance(written.values, tuple) else written.values
            return jnp.mean(values), written.state

        (value, state), gradient = jax.value_and_grad(mean, has_aux=True)(params)
        updates, moments = OPTIMIZER.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, state, value

    moments, state, losses = OPTIMIZER.init(params), model.state, []
    for batch in training.slices(rows(), BATCH) * 2:
        params, moments, state, value = step(params, moments, state, batch)
        losses.append(float(value))
    return arrays(rx.Stateful(eqx.combine(params, rest), state)), losses


CASES = {
    **{f"network, {mode}, {count}": (network, mode, count) for mode, count in PLACES},
    **{f"codebook, {mode}, {count}": (codebook, mode, count) for mode, count in GATHERED},
}


def by_the_loss(
    loss: Any, model: rx.Stateful, mode: str, devices: int, count: int = 64, **settings: Any
) -> tuple[Any, rx.TrainState, list[float]]:
    """Train with a loss and an optimizer; returns the model, the state and the losses."""
    dp = parallel(loss, mode, devices, **settings)
    state, losses = trained(dp, model, count)
    return dp.model(state), state, losses


def updated(loss: Any, net: rx.Stateful, moments: Any, batch: Any, key: Any) -> Any:
    means, gradient, written = rx.value_and_grad(loss)(net, batch, key)
    updates, moments = OPTIMIZER.update(gradient, moments, eqx.filter(net.model, eqx.is_array))
    return rx.Stateful(eqx.apply_updates(net.model, updates), written), moments, means


def in_a_step(
    loss: Any, model: rx.Stateful, mode: str, devices: int, count: int = 64, **settings: Any
) -> tuple[Any, rx.TrainState, list[float]]:
    """Do the same with a custom step."""

    def step(state: Any, batch: Any, key: Any) -> Any:
        net, moments, means = updated(loss, state["net"], state["moments"], batch, key)
        return {"net": net, "moments": moments}, means

    dp = training.parallel(step=step, mode=mode, devices=devices, **settings)
    moments = OPTIMIZER.init(eqx.filter(model.model, eqx.is_array))
    state, losses = trained(dp, {"net": model, "moments": moments}, count)
    return dp.model(state)["net"], state, losses


WAYS = [by_the_loss, in_a_step]
either_way = pytest.mark.parametrize("train", WAYS)
KEPT = [
    *((way, name) for name in ("network, jit, 4", "codebook, shard_map, 4") for way in WAYS),
    (in_a_step, "codebook, exact, 4"),
]


@pytest.mark.parametrize(("train", "name"), only(KEPT, itertools.product(WAYS, CASES)))
def test_it_is_plain_jax(train: Any, name: str) -> None:
    model, mode, devices = CASES[name]
    wanted, expected = by_hand(model)
    found, _, losses = train(LOSSES[model], model(), mode, devices)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_near(arrays(found), wanted, rtol=1e-4)


def test_evaluation_reads_the_state_and_leaves_it() -> None:
    dp = parallel(equinox_loss, "jit", 4)
    state, _ = trained(dp, network())
    before = bits(state)
    found = dp.evaluate(state, dp.feed(rows(52), BATCH))
    model = eqx.nn.inference_mode(dp.model(state))
    values, metrics = equinox_loss(model, rows(52), None).values
    assert found["loss"] == pytest.approx(float(values.mean()), rel=1e-5)
    assert found["size"] == pytest.approx(float(metrics["size"].mean()), rel=1e-5)
    assert bits(state) == before


@either_way
def test_padding_is_left_out_where_the_loss_leaves_it_out(train: Any) -> None:
    *_, wanted = train(codes_loss, codebook(), "single", 1, 52)
    *_, found = train(codes_loss, codebook(), "shard_map", 4, 52)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@either_way
@pytest.mark.parametrize(
    ("mode", "devices"), [("shard_map", 4), exhaustive(("pmap", 4)), ("exact", 1), ("exact", 4)]
)
def test_statistics_of_one_replica_are_refused(train: Any, mode: str, devices: int) -> None:
    with refused(rx.errors.LossError, match="mode='jit'"):
        train(equinox_loss, network(), mode, devices)


def of_linear(state: Callable[[Any], Any]) -> Any:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        values = (batch["x"] @ model.model["w"])[:, 0] ** 2
        return rx.NewState(values, state(model.state))

    return loss


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: {"codes": s["codes"][:2], "steps": s["steps"]},
            r"float32\[5,3\] and is float32\[2,3\]",
        ),
        (lambda s: {**s, "steps": s["steps"] * 1.0}, r"int32\[\] and is float32\[\]"),
        (lambda s: {"codes": s["codes"]}, "missing"),
    ],
)
def test_a_state_of_other_arrays_is_refused(change: Any, said: str) -> None:
    with pytest.raises(rx.errors.LossError, match=said.replace(",", ", ?")):
        trained(parallel(of_linear(change), "jit", 1), codebook())


@pytest.mark.promise("exact.gathered-rows")
@either_way
@pytest.mark.parametrize("count", [64, 52])
def test_exact_has_the_same_bits(train: Any, count: int) -> None:
    runs = (train(codes_loss, codebook(), "exact", n, count) for n in (1, 2, 8))
    first, *others = ((bits(state), losses) for _, state, losses in runs)
    assert others == [first, first]


@pytest.mark.parametrize("mode", ["exact", "shard_map"])
def test_a_state_that_no_row_reaches_needs_no_gather(mode: str) -> None:
    counted = of_linear(lambda s: {**s, "steps": s["steps"] + 1})
    assert int(trained(parallel(counted, mode, 4), codebook())[0].extras.state["steps"]) == 4


def test_a_loss_that_returns_no_state_is_refused() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return (batch["x"] @ model.model["w"])[:, 0] ** 2

    with pytest.raises(rx.errors.LossError, match=r"rx\.NewState\(values, state\)"):
        trained(parallel(loss, "jit", 1), codebook())


def test_an_equinox_state_by_itself_names_the_fix() -> None:
    with pytest.raises(rx.errors.ConfigError, match=r"Equinox State.*rx\.Stateful\(model, state\)"):
        parallel(equinox_loss, "jit", 1).init(eqx.nn.make_with_state(Network)(jax.random.key(0)))


def test_a_model_that_happens_to_have_no_state_trains() -> None:
    counted = of_linear(lambda _: {})
    _, losses = trained(parallel(counted, "jit", 1), rx.Stateful({"w": jnp.ones((4, 1))}, {}))
    assert losses[-1] < losses[0]


# In a custom step alone, which gets the state that the loss wrote.


@pytest.mark.parametrize(
    ("train", "mode", "devices", "accumulate"),
    [(by_the_loss, "jit", 4, 2), (in_a_step, "shard_map", 2, 4), (by_the_loss, "exact", 2, 1)],
)
def test_state_without_rows_is_updated_once_in_a_step(
    train: Any, mode: str, devices: int, accumulate: int
) -> None:
    wanted, expected = by_hand(spectral)
    found, _, losses = train(spectral_loss, spectral(), mode, devices, accumulate=accumulate)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_near(arrays(found), wanted, rtol=1e-5)


def test_state_with_rows_is_handed_from_one_micro_batch_to_the_next() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        x, state = batch["x"], model.state
        state = {
            "mean": 0.9 * state["mean"] + 0.1 * x.mean(),
            "of_means": state["of_means"] + state["mean"],
            "rows": state["rows"] + len(x),
            "steps": state["steps"] + 1,
        }
        return rx.NewState((x @ model.model["w"])[:, 0] ** 2, state)

    before = {"mean": 0.0, "of_means": 0.0, "rows": jnp.int32(0), "steps": jnp.int32(0)}
    dp = parallel(loss, "jit", 2, accumulate=2)
    state = dp.init(rx.Stateful(codebook().model, jax.tree.map(jnp.asarray, before)))
    after = dp.model(dp.step(state, rows(16))[0]).state
    first, second = rows(16)["x"][::2].mean(), rows(16)["x"][1::2].mean()
    np.testing.assert_allclose(after["mean"], 0.09 * first + 0.1 * second, rtol=1e-5)
    np.testing.assert_allclose(after["of_means"], 0.1 * first, rtol=1e-5)
    assert (int(after["rows"]), int(after["steps"])) == (16, 1)


@pytest.mark.parametrize("mode", ["shard_map", "exact"])
def test_state_from_the_key_of_a_replica_is_refused(mode: str) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        drawn = jax.random.normal(key, model.state["codes"].shape)
        return rx.NewState(
            (batch["x"] @ model.model["w"])[:, 0] ** 2, {**model.state, "codes": drawn}
        )

    with pytest.raises(rx.errors.LossError):
        in_a_step(loss, codebook(), mode, 4)


def test_written_rows_are_refused_in_micro_batches() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        found = batch["x"] @ model.model["w"]
        return rx.NewState(found[:, 0] ** 2, {"before": found})

    model = rx.Stateful(codebook().model, {"before": jnp.zeros((BATCH, 3))})
    net, *_ = in_a_step(loss, model, "jit", 4)
    assert np.any(net.state["before"] != 0)
    for mode, accumulate in (("jit", 2), ("shard_map", 1)):
        with pytest.raises(rx.errors.LossError):
            in_a_step(loss, model, mode, 4, accumulate=accumulate)


@pytest.mark.parametrize("mode", ["shard_map", "exact"])
def test_several_updates_hand_the_state_on(mode: str) -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        def update(carry: Any, _: Any) -> Any:
            net, moments, means = updated(codes_loss, *carry, batch, key)
            return (net, moments), means["loss"]

        begin = state["net"], state["moments"]
        (net, moments), losses = jax.lax.scan(update, begin, None, length=2)
        return {"net": net, "moments": moments}, {"loss": losses[-1]}

    begin = {"net": codebook(), "moments": OPTIMIZER.init(codebook().model)}
    runs = [trained(training.parallel(step=step, mode=each), begin) for each in ("single", mode)]
    np.testing.assert_allclose(runs[1][1], runs[0][1], rtol=1e-5)
    assert int(runs[1][0].params["net"].state["steps"]) == 8


def test_without_a_key_nothing_is_written() -> None:
    _, _, written = rx.value_and_grad(codes_loss)(codebook(), rows())
    assert bits(written) == bits(codebook().state)


def test_the_written_state_is_not_differentiated() -> None:
    def through(model: Any) -> Any:
        net = rx.Stateful(model, codebook().state)
        return jnp.sum(rx.value_and_grad(codes_loss)(net, rows(), jax.random.key(0))[2]["codes"])

    with pytest.raises(rx.errors.LossError, match="differentiated"):
        jax.grad(through)(codebook().model)
