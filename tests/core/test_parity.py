"""Every mode, device count and number of micro-batches computes what one device computes.

Each case trains five steps on 51 real rows padded to 64, against mode `single` in float32. The
figure is, for each leaf, the largest difference over the largest value.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.agreement import How, agrees, assert_agree, largest_difference, on, reference
from support.cases import CASES, DROPOUT_CASES
from support.tiers import only

import replicax as rx
from replicax.core.modes.mode_table import MODES, Mode
from replicax.core.placement.mesh import DATA

BOUNDS = {"sgd": 1e-6, "adamw": 1e-5}
ROUNDING_DECIDES = {
    # Adam divides every gradient by its own size: one that is near zero by cancellation, and so
    # carries few exact digits, moves its parameter as far as any other. conv2's kernel has some.
    ("lenet", "adamw"): 1e-3,
    # Two million activations pass relu and max pool, whose gradient jumps where two candidates are
    # a rounding apart; BatchNorm's gradient is what is left of sums that cancel.
    ("cnn", "sgd"): 1e-2,
    ("cnn", "adamw"): 1e-2,
    # A key's bias adds the same to all scores of a query, which softmax takes out again: its
    # gradient is 0; only rounding is computed, and Adam takes full steps of it.
    ("gpt2", "adamw"): 1e-3,
    # Long sums: 1.0e-6 to 1.9e-6 on some processors, with the same programs.
    ("lenet", "sgd"): 2e-6,
    ("gpt2", "sgd"): 2e-6,
}
"""Wider bounds for gradient and params in float32. In float64 these
models agree to FLOAT64_BOUND, so the differences are rounding."""
FLOAT64_BOUND = 1e-9
BATCH_NORM = ("linen", "nnx", "cnn")
ROW_BY_ROW = [kind for kind in CASES if kind not in BATCH_NORM]

MODES_OF_DEVICES = ("jit", "shard_map", "pmap")
OPTIMIZERS = ("sgd", "adamw")


def bounds(kind: str, how: How) -> dict[str, float]:
    """Loss and metrics of the first step get no wider bound."""
    if jax.config.jax_enable_x64:
        return dict.fromkeys(("first", "gradient", "params", "extras"), FLOAT64_BOUND)
    wide = ROUNDING_DECIDES.get((kind, how.optimizer), BOUNDS[how.optimizer])
    return {"first": BOUNDS["sgd"], "gradient": wide, "params": wide, "extras": wide}


def on_devices(kind: str, mode: str, devices: int, accumulate: int, optimizer: str) -> Any:
    """Return a case of the tests below."""
    return kind, on(mode, data=devices, accumulate=accumulate, optimizer=optimizer)


EXACT = [
    on_devices(kind, "exact", devices, 1, optimizer)
    for kind, devices, optimizer in itertools.product(ROW_BY_ROW, (2, 8), OPTIMIZERS)
]
"""Without BatchNorm, whose statistics are those of a micro-shard."""
PRODUCT = [
    on_devices(kind, *rest)
    for kind, *rest in itertools.product(CASES, MODES_OF_DEVICES, (1, 2, 8), (1, 4), OPTIMIZERS)
]
PAIRWISE = [
    on_devices(
        kind,
        mode,
        (1, 2, 8)[(number + place) % 3],
        (1, 4)[(number // 2 + place) % 2],
        OPTIMIZERS[(number + place) % 2],
    )
    for number, kind in enumerate(CASES)
    for place, mode in enumerate(MODES_OF_DEVICES)
]
"""Three cases of each model, which contain all pairs of values."""
IN_EVERY_TEST_RUN = [
    on_devices("weighted", "jit", 8, 4, "sgd"),
    on_devices("linen", "jit", 2, 4, "sgd"),
    on_devices("linear_regression", "jit", 1, 4, "adamw"),
    on_devices("linen", "shard_map", 8, 4, "sgd"),
    on_devices("rnn", "shard_map", 2, 1, "sgd"),
    on_devices("linear_regression", "shard_map", 1, 4, "adamw"),
    on_devices("weighted", "pmap", 8, 1, "sgd"),
    on_devices("nnx", "pmap", 2, 4, "adamw"),
    on_devices("linear_regression", "pmap", 1, 4, "adamw"),
    on_devices("equinox", "exact", 2, 1, "adamw"),
]
"""Each mode on each number of devices, and each small model; `pytree` is that of `weighted`."""


@pytest.mark.promise("parity.devices-compute-what-one-does")
@pytest.mark.parametrize(
    ("kind", "how"),
    only(IN_EVERY_TEST_RUN, [*PRODUCT, *EXACT], [*PAIRWISE, *EXACT]),
    ids=str,
)
def test_agrees_with_one_device(kind: str, how: How) -> None:
    agrees(CASES[kind], how, bounds(kind, how))


SIMULATED = 4


def simulated_replicas(function: Any, _mesh: Any, _into: Any, _out: Any) -> Any:
    """Simulate replicas side by side on one device."""

    def call(state: Any, batch: Any) -> Any:
        rows = jax.tree.map(lambda leaf: leaf.reshape(SIMULATED, -1, *leaf.shape[1:]), batch)
        replica = functools.partial(function, state, axis=DATA)
        outcome = jax.vmap(lambda batch: replica(batch=batch), axis_name=DATA)(rows)
        return jax.tree.map(lambda leaf: leaf[0], outcome)

    return call


@pytest.mark.parametrize("accumulate", only([4], [1, 4]))
@pytest.mark.parametrize(
    "kind", only(["weighted"], [kind for kind in CASES if kind not in ("lenet", "cnn")])
)
def test_a_custom_mode_is_one_entry(
    kind: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without convolutions: those of several replicas become grouped, and round otherwise."""
    mode = Mode("vmap", simulated_replicas, per_replica=True)
    monkeypatch.setitem(MODES, mode.name, mode)
    parts = ("first", "gradient", "params", "extras")
    how = on("vmap", accumulate=accumulate, optimizer="sgd")
    agrees(CASES[kind], how, dict.fromkeys(parts, BOUNDS["sgd"]))


IN_FLOAT64 = [
    on_devices(kind, mode, devices, (1, 4)[(number + place) % 2], optimizer)
    for number, (kind, optimizer) in enumerate(ROUNDING_DECIDES)
    for place, (mode, devices) in enumerate(itertools.product(MODES_OF_DEVICES, (2, 8)))
]
"""One accumulation for each, so that all pairs of values occur."""
PLACES = 6
TWO_OF_EACH = [
    case for at, case in enumerate(IN_FLOAT64) if (at % PLACES - at // PLACES) % (PLACES // 2) == 0
]
"""For each model both device counts, and both accumulations."""


@pytest.mark.parametrize(("kind", "how"), only([], IN_FLOAT64, TWO_OF_EACH), ids=str)
def test_agrees_in_float64_where_rounding_decides(kind: str, how: How) -> None:
    with jax.enable_x64(True):
        agrees(CASES[kind], how, bounds(kind, how))


@pytest.mark.parametrize("devices", only([2], [2, 8]))
@pytest.mark.parametrize("accumulate", only([4], [1, 4]))
@pytest.mark.parametrize("kind", only(["nnx"], DROPOUT_CASES))
def test_jit_draws_the_masks_of_one_device(kind: str, devices: int, accumulate: int) -> None:
    _, how = on_devices(kind, "jit", devices, accumulate, "sgd")
    agrees(DROPOUT_CASES[kind], how, bounds(kind, how))


def alone(kind: str, accumulate: int = 1) -> dict[str, Any]:
    """Return what one device computes with SGD."""
    trained = reference(CASES[kind], on("single", accumulate=accumulate, optimizer="sgd"))
    return trained.parts("first", "gradient", "params", "extras")


@pytest.mark.promise("parity.micro-batches")
@pytest.mark.parametrize("kind", only(["weighted", "rnn"], ROW_BY_ROW))
def test_micro_batches_agree_with_one(kind: str) -> None:
    """BatchNorm is left out: its statistics are those of a micro-batch."""
    assert_agree(alone(kind, 4), alone(kind), bounds(kind, on("single", optimizer="sgd")))


@pytest.mark.promise("parity.padding-weighs-nothing")
@pytest.mark.parametrize("kind", only(["weighted", "rnn"], ROW_BY_ROW))
def test_padded_rows_count_for_nothing(kind: str) -> None:
    """Train on the 51 rows alone, by hand and without a mask."""
    case, expected = CASES[kind], alone(kind)
    dp = reference(case, on("single", optimizer="sgd")).dp
    state = dp.init(case.model())

    def mean_loss(params: Any) -> Any:
        model = dp.model(rx.TrainState(0, params, None, state.extras, 0))
        returned = case.loss(model, case.source, jax.random.key(0))
        values = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(values, rx.Weighted):
            return jnp.sum(values.values * values.weights) / jnp.sum(values.weights)
        return jnp.mean(values)

    loss, gradient = jax.value_and_grad(mean_loss)(state.params)
    assert largest_difference(loss, expected["first"]["loss"])[0] <= BOUNDS["sgd"]
    difference, path = largest_difference(gradient, expected["gradient"])
    assert difference <= ROUNDING_DECIDES.get((kind, "sgd"), BOUNDS["sgd"]), path
