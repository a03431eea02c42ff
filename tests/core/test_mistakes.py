"""Mistakes with a loss, an optimizer, a state or a batch: each one line, with the fix."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.example_libraries import optimizers
from support.figures import assert_mentions

import replicax as rx

MODEL = {"w": jnp.ones(3)}
ROWS = {"x": np.arange(24, dtype=np.float32).reshape(8, 3)}
MODES = ("single", "jit", "shard_map", "pmap", "exact")


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"]) ** 2


def make(function: Any = loss, optimizer: Any = None, **options: Any) -> rx.DataParallel:
    return rx.DataParallel(function, optimizer or optax.adam(0.1), **options)


def refusal(kind: type[rx.ReplicaxError], call: Callable[[], Any]) -> str:
    """What is said when `call` is refused."""
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TorchLike:
    """`torch.optim.Adam`, as far as anybody can see without calling it."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optax.adam, "adam, not called"),
        (optax.MultiSteps, "MultiSteps, not called"),
        (optax.constant_schedule(0.1), "not called"),
        (0.1, "float"),
        ("adam", "str"),
        (nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param), "Opti"),
        (optimizers.adam(0.1), "Optimizer"),
        (functools.partial(optax.adam, 0.1), "partial"),
        (TorchLike(), "TorchLike"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_optimizer_is_refused_by_the_constructor(optimizer: Any, name: str) -> None:
    said = refusal(rx.ConfigError, lambda: rx.DataParallel(loss, optimizer))
    assert name in said
    assert "optax" in said


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.chain(optax.clip(1.0), optax.lion(0.1)),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a"}),
    ],
)
def test_what_optax_makes_is_an_optimizer(optimizer: Any) -> None:
    dp = make(optimizer=optimizer, mode="single")
    state, _ = dp.step(dp.init(MODEL), ROWS)
    assert int(state.step) == 1


def two(model, batch) -> Any:
    return loss(model, batch, None)


@functools.wraps(two)
def wrapped(*arguments: Any) -> Any:
    return two(*arguments[:2])


class Loss:
    """A callable with settings."""

    def __call__(self, model: Any, batch: Any, key: Any, scale: float = 1.0) -> Any:
        return scale * loss(model, batch, key)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (two, ["(model, batch)", "3 arguments"]),
        (lambda batch: batch, ["(batch)", "3 arguments"]),
        (lambda model, batch, key, state: batch, ["(model, batch, key, state)", "3 arguments"]),
        (lambda model, batch, *, key: batch, ["key", "3 arguments"]),
        (jax.jit(two), ["(model, batch)", "3 arguments"]),
        (optax.adam(0.1), ["GradientTransformation"]),
        ("mse", ["str"]),
        (None, ["NoneType"]),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_by_the_constructor(
    function: Any, words: list[str]
) -> None:
    said = refusal(rx.ConfigError, lambda: make(function))
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    "function",
    [
        Loss(),
        Loss().__call__,
        lambda model, batch, key=None: loss(model, batch, key),
        lambda *arguments: loss(*arguments),
        lambda model, *rest, scale=2.0: scale * loss(model, *rest),
        functools.partial(lambda scale, m, b, k: scale * loss(m, b, k), 2.0),
        functools.partial(lambda m, b, k, scale: scale * loss(m, b, k), scale=2.0),
        jax.jit(loss),
        jax.checkpoint(loss),
        nnx.jit(loss),
        wrapped,
    ],
)
def test_whatever_takes_three_arguments_is_a_loss(function: Any) -> None:
    dp = make(function, mode="single")
    _, metrics = dp.step(dp.init(MODEL), ROWS)
    assert float(metrics["loss"]) > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_with_logits_beside_it_is_refused_with_their_shapes(mode: str) -> None:
    def with_logits(model: Any, batch: Any, key: Any) -> Any:
        return loss(model, batch, key), batch["x"]

    dp = make(with_logits, mode=mode)
    state = dp.init(MODEL)
    for call in (dp.step, lambda state, batch: dp.evaluate(state, [batch])):
        said = refusal(rx.LossError, functools.partial(call, state, ROWS))
        assert "(float32[8], float32[8,3])" in said
        assert "Tracer" not in said


@pytest.mark.parametrize("call", ["step", "evaluate", "model"])
@pytest.mark.parametrize("known", [False, True])
def test_a_model_is_no_state(call: str, known: bool) -> None:
    dp = make(mode="single")
    if known:
        dp.init(MODEL)
    calls = {
        "step": lambda: dp.step(MODEL, ROWS),  # type: ignore[arg-type]
        "evaluate": lambda: dp.evaluate(MODEL, [ROWS]),  # type: ignore[arg-type]
        "model": lambda: dp.model(MODEL),  # type: ignore[arg-type]
    }
    said = refusal(rx.StateError, calls[call])
    assert "init(model)" in said
    assert "dict" in said or not known


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (optax.sgd(0.1), "opt_state"),
        (optax.sgd(0.1, momentum=0.9), "opt_state"),
        (optax.chain(optax.clip(1.0), optax.adam(0.1)), "opt_state"),
    ],
)
@pytest.mark.parametrize("mode", ["jit", "pmap"])
def test_a_state_of_another_optimizer_is_refused(optimizer: Any, name: str, mode: str) -> None:
    dp = make(mode=mode)
    dp.init(MODEL)
    state = make(optimizer=optimizer, mode=mode).init(MODEL)
    for call in (dp.step, lambda state, batch: dp.evaluate(state, [batch])):
        said = refusal(rx.StateError, functools.partial(call, state, ROWS))
        assert f"state.{name}" in said
        assert "optimizer" in said


def test_optimizers_without_arrays_differ_too() -> None:
    dp = make(optimizer=optax.sgd(0.1), mode="single")
    dp.init(MODEL)
    state = make(optimizer=optax.chain(optax.clip(1.0), optax.sgd(0.1)), mode="single").init(MODEL)
    assert "structure" in refusal(rx.StateError, lambda: dp.step(state, ROWS))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"w": jnp.ones((3, 2))}, ["['w']", "(3, 2)", "(3,)"]),
        ({"w": jnp.ones(3), "b": jnp.ones(5)}, ["['b']", "(5,)"]),
    ],
)
def test_a_state_of_another_model_is_refused(model: Any, words: list[str]) -> None:
    dp = make()
    state, _ = dp.step(dp.init(MODEL), ROWS)
    other = make().init(model)
    for _ in range(2):
        said = refusal(rx.StateError, lambda: dp.step(other, ROWS))
        for word in words:
            assert word in said
    assert int(dp.step(state, ROWS)[0].step) == 2


def test_a_state_of_another_layout_is_refused_with_the_number_of_arrays() -> None:
    wide = {"w": jnp.ones((3, 16))}
    dp, split = (
        make(lambda m, b, k: (b["x"] @ m["w"]).sum(1), layout=layout)
        for layout in ("replicated", "zero1")
    )
    dp.init(wide)
    said = refusal(rx.StateError, lambda: dp.step(split.init(wide), ROWS))
    assert "2 arrays" in said
    assert "layout" in said


def test_a_state_with_other_values_is_its_own() -> None:
    """As target networks and schedule-free averages are put in: on the host, in other dtypes."""
    dp = make(donate=False)
    state = dp.init(MODEL)
    for changed in (
        dataclasses.replace(state, params={"w": np.zeros(3)}),
        dataclasses.replace(state, params={"w": state.params["w"] / 2}),
        dataclasses.replace(state, step=3, seed=7),
    ):
        after, _ = dp.step(changed, ROWS)
        assert int(after.step) == int(changed.step) + 1


def test_a_step_inside_jit_is_refused() -> None:
    dp = make()
    state = dp.init(MODEL)
    (batch,) = dp.feed(ROWS, 8)
    calls = (
        lambda: jax.jit(dp.step)(state, ROWS),
        lambda: jax.jit(lambda rows: dp.step(state, rows))(ROWS),
        lambda: jax.jit(lambda rows: dp.step(state, rows))(batch),
        lambda: jax.jit(lambda rows: dp.evaluate(state, [rows]))(ROWS),
        lambda: jax.grad(lambda s: dp.step(s, ROWS)[1]["loss"], allow_int=True)(state),
    )
    for call in calls:
        assert "jax.jit" in refusal(rx.StateError, call)
    assert int(dp.step(state, batch)[0].step) == 1


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "pmap"])
def test_a_model_outlives_the_state_that_it_was_taken_from(mode: str) -> None:
    dp = make(mode=mode)
    state = dp.init(MODEL)
    model = dp.model(state)
    for _ in range(2):
        state, _ = dp.step(state, ROWS)
    np.testing.assert_array_equal(model["w"], MODEL["w"])
    assert not np.allclose(dp.model(state)["w"], model["w"])


@pytest.mark.parametrize("layout", ["replicated", "fsdp"])
def test_a_model_lies_where_its_state_does(layout: str) -> None:
    wide = {"w": jnp.arange(48.0).reshape(3, 16)}
    dp = make(lambda m, b, k: (b["x"] @ m["w"]).sum(1), layout=layout)
    state = dp.init(wide)
    model = dp.model(state)
    assert model["w"].sharding.is_equivalent_to(state.params["w"].sharding, 2)
    np.testing.assert_array_equal(model["w"], wide["w"])


def test_a_model_without_a_copy_is_the_state() -> None:
    dp = make(mode="single")
    state = dp.init(MODEL)
    assert dp.model(state, copy=False)["w"] is state.params["w"]


def test_a_state_that_is_not_donated_shares_its_arrays() -> None:
    dp = make(mode="single", donate=False)
    state = dp.init(MODEL)
    assert dp.model(state)["w"] is state.params["w"]


def test_a_model_of_a_state_that_is_gone_is_refused() -> None:
    dp = make()
    state = dp.init(MODEL)
    dp.step(state, ROWS)
    assert "donate" in refusal(rx.StateError, lambda: dp.model(state))


DRAWS = {
    "split": lambda key: jax.random.normal(jax.random.split(key)[0], (8,)),
    "fold": lambda key: jax.random.normal(jax.random.fold_in(key, 1), (8,)),
    "draw": lambda key: jax.random.normal(key, (8,)),
    "index": lambda key: jax.random.key_data(key)[0] * jnp.zeros(8),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_loss_that_needs_the_key_in_evaluation_is_told_so(draw: str, trained: bool) -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        return loss(model, batch, key) + DRAWS[draw](key)[: len(batch["x"])]

    dp = make(noisy)
    state = dp.init(MODEL)
    if trained:
        state, _ = dp.step(state, ROWS)
    said = refusal(rx.LossError, lambda: dp.evaluate(state, [ROWS]))
    assert_mentions(said, "evaluation", "key is", "None")


def test_an_error_of_the_loss_in_evaluation_is_its_own() -> None:
    def wrong(model: Any, batch: Any, key: Any) -> Any:
        if key is None:
            return loss(model, batch, key) @ jnp.ones((4, 4))
        return loss(model, batch, key)

    def always_wrong(model: Any, batch: Any, key: Any) -> Any:
        return loss(model, batch, key) @ jnp.ones((4, 4))

    for function, raised in ((always_wrong, TypeError), (wrong, rx.LossError)):
        dp = make(function)
        with pytest.raises(raised, match=r"\(4, 4\)|\(4,\)"):
            dp.evaluate(dp.init(MODEL), [ROWS])


@pytest.mark.parametrize("place", [lambda keys: keys, jax.device_get], ids=["device", "host"])
def test_random_keys_in_a_batch_are_refused_by_name(place: Any) -> None:
    keys = place(jax.random.split(jax.random.key(0), 8))
    rows = {**ROWS, "noise": keys}
    dp = make()
    state = dp.init(MODEL)
    calls = (
        lambda: dp.step(state, rows),
        lambda: dp.step(state, jax.tree.map(jnp.asarray, rows)),
        lambda: list(dp.feed(rows, 8)),
        lambda: list(dp.feed([rows])),
        lambda: dp.evaluate(state, [rows]),
        lambda: dp.lower(MODEL, jax.eval_shape(lambda: rows)),
    )
    for call in calls:
        said = refusal(rx.DataError, call)
        assert "batch['noise'] holds 8 random keys" in said
        assert "jax.random.key_data" in said


def test_keys_as_numbers_may_be_rows() -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        keys = jax.random.wrap_key_data(batch["noise"])
        return loss(model, batch, key) + jax.vmap(jax.random.normal)(keys)

    numbers = jax.random.key_data(jax.random.split(jax.random.key(0), 8))
    dp = make(noisy, mode="shard_map")
    _, metrics = dp.step(dp.init(MODEL), {**ROWS, "noise": numbers})
    plain = loss(MODEL, ROWS, None) + jax.vmap(jax.random.normal)(jax.random.wrap_key_data(numbers))
    np.testing.assert_allclose(metrics["loss"], plain.mean(), rtol=1e-6)
