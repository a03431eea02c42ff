"""Custom steps that are refused: replicas that would differ, and broken contracts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.custom_step import BATCH, State, loss, optimizer, parallel, rows, state, step, trained

import replicax as rx


def changed(**values: Callable[[State, Any, Any], Any]) -> Any:
    """`step` with other values in its state or metrics."""

    def other(state: State, batch: Any, key: Any) -> Any:
        after, metrics = step(state, batch, key)
        metrics |= {n: f(state, batch, key) for n, f in values.items() if n not in after}
        return {
            **after,
            **{n: f(state, batch, key) for n, f in values.items() if n in after},
        }, metrics

    return other


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        (changed(seen=lambda s, b, k: jnp.mean(b["y"])), "metrics.seen .*rows"),
        (changed(done=lambda s, b, k: s["done"] + b["x"].sum().astype(int)), "state.done .*rows"),
        (changed(seen=lambda s, b, k: jax.random.uniform(k)), "metrics.seen .*key"),
        (changed(seen=lambda s, b, k: jax.lax.axis_index("data") * 1.0), "reduces over"),
    ],
)
def test_replicas_that_would_differ_are_refused(custom: Any, said: str) -> None:
    with pytest.raises(rx.errors.LossError, match=said):
        trained(parallel(custom), state())
    if "reduces" not in said:
        trained(parallel(custom, "jit"), state(), batch_size=52)


def test_rows_of_the_step_itself_need_real_rows() -> None:
    custom = changed(seen=lambda s, b, k: jnp.mean(b["y"]))
    with pytest.raises(rx.errors.LossError, match=r"rx\.row_weights"):
        trained(parallel(custom, "jit", 8), state())
    _, told = trained(parallel(custom, "jit"), state())  # 20 rows are 5 for each device
    assert told[1]["seen"] == pytest.approx(rows()["y"][BATCH:].mean(), rel=1e-5)
    weighed = changed(seen=lambda s, b, k: jnp.sum(b["y"][:, 0] * rx.row_weights(b["y"])))
    trained(parallel(weighed, "jit"), state())


def test_gathered_rows_need_real_rows_too() -> None:
    custom = changed(seen=lambda s, b, k: jnp.mean(rx.gather(b["y"])))
    with pytest.raises(rx.errors.LossError, match=r"rx\.row_weights"):
        trained(parallel(custom, devices=8), state())
    _, told = trained(parallel(custom), state(), batch_size=52)
    assert told[0]["seen"] == pytest.approx(rows()["y"].mean(), rel=1e-5)


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    here = batch["x"] @ model["w"]
    return jax.nn.logsumexp(here @ here.T, axis=1)


def normalised(model: Any, batch: Any, key: Any) -> Any:
    found = batch["x"] @ model["w"]
    found = jax.lax.sort(found)  # no rule for it, and rows stay apart
    return jnp.sum(found, -1)


def with_loss(loss: Any) -> Any:
    def custom(state: State, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
        return {**state, "model": jax.tree.map(lambda p, g: p - g, state["model"], gradient)}, means

    return custom


def test_a_loss_whose_rows_meet_is_refused() -> None:
    with pytest.raises(rx.errors.LossError, match=r"rx\.gather"):
        trained(parallel(with_loss(contrastive)), state())
    with pytest.raises(rx.errors.LossError, match="accumulate=1"):
        trained(parallel(with_loss(contrastive), "jit", accumulate=2), state())
    with pytest.raises(rx.errors.LossError, match="row_weights"):
        trained(parallel(with_loss(contrastive), "jit", 8), state())
    trained(parallel(with_loss(contrastive), "jit"), state(), batch_size=52)
    trained(parallel(with_loss(normalised)), state())


def test_a_loss_may_close_over_what_the_step_has() -> None:
    def step(state: State, batch: Any, key: Any) -> Any:
        rate = 0.1 / (1 + rx.step_number())

        def scaled(model: Any, batch: Any, key: Any) -> Any:
            return rate * loss(model, batch, key)[0]

        means, gradient = rx.value_and_grad(scaled)(state["model"], batch, key)
        model = jax.tree.map(lambda p, g: p - g, state["model"], gradient)
        return {**state, "model": model}, means

    _, expected = trained(parallel(step, "single", 1), state())
    _, found = trained(parallel(step), state())
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in expected], rel=1e-6)


STEPS: dict[str, tuple[Any, type[Exception], str]] = {
    "no metrics": (lambda s, b, k: s, rx.errors.StateError, "return state, metrics"),
    "no loss": (lambda s, b, k: (s, {"a": jnp.float32(0)}), rx.errors.StateError, "'loss'"),
    "a metric of rows": (lambda s, b, k: (s, {"loss": b["y"]}), rx.errors.StateError, "rx.mean"),
    "another dtype": (
        changed(done=lambda s, b, k: s["done"] * 1.0),
        rx.errors.StateError,
        r"\['done'\] is int32\[\] before the step and float32\[\] after",
    ),
    "another structure": (
        lambda s, b, k: (s["model"], {"loss": jnp.float32(0)}),
        rx.errors.StateError,
        "missing",
    ),
    "other rows": (
        lambda s, b, k: (s, {"loss": rx.mean(b["y"][:3])}),
        rx.errors.LossError,
        "3 rows, and the step sees 32",
    ),
    "differentiated": (
        lambda s, b, k: (s, {"loss": jax.grad(lambda v: rx.mean(b["y"] * v))(1.0)}),
        rx.errors.LossError,
        "rx.value_and_grad a loss",
    ),
    "sums in a loss": (
        with_loss(lambda m, b, k: b["x"] @ m["w"] - rx.mean(b["x"])),
        rx.errors.LossError,
        "rx.mean was called in a loss",
    ),
    "ints": (
        with_loss(lambda m, b, k: b["x"].sum(-1).astype(int)),
        rx.errors.LossError,
        "dtype int32",
    ),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_that_does_not_keep_its_contract(name: str) -> None:
    custom, error, said = STEPS[name]
    with pytest.raises(error, match=said) as caught:
        trained(parallel(custom, "jit", 1), state())
    assert "\n" not in str(caught.value)


def test_a_python_number_that_changes_is_refused() -> None:
    counted = changed(done=lambda s, b, k: s["done"] + 1)
    with pytest.raises(rx.errors.StateError, match=r"jnp\.asarray"):
        trained(parallel(counted, "jit", 1), {**state(), "done": 0})


class Remembers:
    """A reduction with a state."""

    name = "remembers"

    def init(self, params: Any) -> Any:
        return jnp.zeros(())

    def __call__(self, sums: Any, state: Any, axis: str) -> Any:
        return sums, state


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": optimizer}, "optimizer"),
        ({"ema": 0.9}, "ema"),
        ({"trainable": "w"}, "trainable"),
        ({"layout": "zero1", "mode": "jit"}, "layout='fsdp'"),
        ({"step": 3}, "step\\(state, batch, key\\)"),
        ({"step": lambda state, batch: state}, "called with 3 arguments"),
        ({"reduction": Remembers()}, "'float32' or 'bfloat16'"),
    ],
)
def test_options_that_a_custom_step_cannot_have_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(rx.errors.ConfigError, match=said):
        rx.DataParallel(**{"step": step, "mode": "shard_map", **settings}).init(state())
