"""Every mode, device count and number of micro-batches computes what one device computes.

Each case trains five steps on 51 real rows padded to 64, against mode `single` in float32. The
figure is, for each leaf, the largest difference over the largest value.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.agreement import in_float64, largest_difference, record_gradient, without_keys
from support.cases import BATCH, CASES, DROPOUT_CASES, Case
from support.tiers import only

import replicax as rx
from replicax.core.modes import MODES, Mode
from replicax.core.placement.mesh import DATA

STEPS = 5
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
LAYOUTS = [
    (mode, devices, accumulate)
    for mode in MODES_OF_DEVICES
    for devices in (1, 2, 8)
    for accumulate in (1, 4)
]


OPTIMIZERS = {
    "sgd": lambda: optax.chain(record_gradient(), optax.sgd(0.05, momentum=0.9)),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.01),
}


def run(case: Case, optimizer: str, mode: str, devices: int, accumulate: int) -> dict[str, Any]:
    """Return loss, gradient, params and extras during five steps."""
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    dp = rx.DataParallel(
        case.loss, OPTIMIZERS[optimizer](), mesh=mesh, mode=mode, accumulate=accumulate
    )
    model = case.model()
    state = dp.init(in_float64(model) if jax.config.jax_enable_x64 else model)
    found: dict[str, Any] = {}
    for epoch in range(STEPS):
        (batch,) = dp.feed(case.source, BATCH, shuffle=True, epoch=epoch)
        state, metrics = dp.step(state, batch)
        if epoch == 0:
            found["metrics"] = jax.device_get(metrics)
            if optimizer == "sgd":
                found["gradient"] = jax.device_get(state.opt_state[0])
    found["params"] = jax.device_get(state.params)
    found["extras"] = without_keys(state.extras)
    return found


@functools.cache
def reference(
    kind: str, dropout: bool, optimizer: str, accumulate: int, float64: bool = False
) -> dict[str, Any]:
    assert bool(jax.config.jax_enable_x64) == float64
    cases = DROPOUT_CASES if dropout else CASES
    return run(cases[kind], optimizer, "single", 1, accumulate)


def check(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    """Loss and metrics of the first step get no wider bound."""
    bounds = dict.fromkeys(expected, bound) | {"metrics": min(bound, BOUNDS["sgd"])}
    for part in expected:
        difference, path = largest_difference(found[part], expected[part])
        assert difference <= bounds[part], f"{part}{path} differs by {difference:.1e}"


WHOLE = "linear_regression"
"""The smallest model: `make test` runs it in every mode, device count and accumulation."""


def representative(kind: str, optimizer: str, mode: str, devices: int, accumulate: int) -> bool:
    """Every other model runs in one mode, or in all if it has weights or statistics."""
    if kind == WHOLE:
        place = (1, 2, 8).index(devices) + MODES_OF_DEVICES.index(mode)
        return optimizer == "adamw" and accumulate == (1, 4)[place % 2]
    if kind in ("lenet", "cnn", "mlp", "gpt2"):  # left to float64, or as the others
        return False
    own = MODES_OF_DEVICES[list(CASES).index(kind) % len(MODES_OF_DEVICES)]
    usual = (optimizer, devices, accumulate) == ("adamw", 8, 4)
    return usual and (mode == own or kind in ("weighted", "linen"))


PRODUCT = [
    (kind, optimizer, *layout)
    for kind, optimizer, layout in itertools.product(CASES, OPTIMIZERS, LAYOUTS)
]
PAIRWISE = [
    (
        kind,
        list(OPTIMIZERS)[(number + place) % 2],
        mode,
        (1, 2, 8)[(number + place) % 3],
        (1, 4)[(number // 2 + place) % 2],
    )
    for number, kind in enumerate(CASES)
    for place, mode in enumerate(MODES_OF_DEVICES)
]
"""Three cases of each model, which contain all pairs of values."""
AGREEMENTS = only([case for case in PRODUCT if representative(*case)], PRODUCT, PAIRWISE)


@pytest.mark.parametrize(("kind", "optimizer", "mode", "devices", "accumulate"), AGREEMENTS)
def test_agrees_with_one_device(
    kind: str, optimizer: str, mode: str, devices: int, accumulate: int
) -> None:
    found = run(CASES[kind], optimizer, mode, devices, accumulate)
    bound = ROUNDING_DECIDES.get((kind, optimizer), BOUNDS[optimizer])
    check(found, reference(kind, False, optimizer, accumulate), bound)


@pytest.mark.parametrize("devices", only([8], [2, 8]))
@pytest.mark.parametrize("optimizer", only(["adamw"], OPTIMIZERS))
@pytest.mark.parametrize("kind", only(["weighted", "equinox"], ROW_BY_ROW))
def test_exact_agrees_with_one_device(kind: str, optimizer: str, devices: int) -> None:
    """BatchNorm is left out: its statistics are those of a micro-shard."""
    found = run(CASES[kind], optimizer, "exact", devices, 1)
    bound = ROUNDING_DECIDES.get((kind, optimizer), BOUNDS[optimizer])
    check(found, reference(kind, False, optimizer, 1), bound)


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
    "kind", only(["weighted", "linen"], [kind for kind in CASES if kind not in ("lenet", "cnn")])
)
def test_a_custom_mode_is_one_entry(
    kind: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without convolutions: those of several replicas become grouped, and round otherwise."""
    mode = Mode("vmap", simulated_replicas, per_replica=True)
    monkeypatch.setitem(MODES, mode.name, mode)
    found = run(CASES[kind], "sgd", "vmap", 1, accumulate)
    check(found, reference(kind, False, "sgd", accumulate), BOUNDS["sgd"])


IN_FLOAT64 = [
    (kind, optimizer, mode, devices, (1, 4)[(number + place) % 2])
    for number, (kind, optimizer) in enumerate(ROUNDING_DECIDES)
    for place, (mode, devices) in enumerate(itertools.product(MODES_OF_DEVICES, (2, 8)))
]
"""One accumulation for each, so that all pairs of values occur."""
PLACES = 6
TWO_OF_EACH = [
    case for at, case in enumerate(IN_FLOAT64) if (at % PLACES - at // PLACES) % (PLACES // 2) == 0
]
"""For each model both device counts, and both accumulations."""


@pytest.mark.parametrize(
    ("kind", "optimizer", "mode", "devices", "accumulate"), only([], IN_FLOAT64, TWO_OF_EACH)
)
def test_agrees_in_float64_where_rounding_decides(
    kind: str, optimizer: str, mode: str, devices: int, accumulate: int
) -> None:
    with jax.enable_x64(True):
        found = run(CASES[kind], optimizer, mode, devices, accumulate)
        check(found, reference(kind, False, optimizer, accumulate, True), FLOAT64_BOUND)


@pytest.mark.parametrize("devices", only([8], [2, 8]))
@pytest.mark.parametrize("accumulate", only([4], [1, 4]))
@pytest.mark.parametrize("kind", only(["nnx"], DROPOUT_CASES))
def test_jit_draws_the_masks_of_one_device(kind: str, devices: int, accumulate: int) -> None:
    found = run(DROPOUT_CASES[kind], "sgd", "jit", devices, accumulate)
    bound = ROUNDING_DECIDES.get((kind, "sgd"), BOUNDS["sgd"])
    check(found, reference(kind, True, "sgd", accumulate), bound)


@pytest.mark.parametrize("kind", only(["weighted", "rnn"], ROW_BY_ROW))
def test_micro_batches_agree_with_one(kind: str) -> None:
    """BatchNorm is left out: its statistics are those of a micro-batch."""
    bound = ROUNDING_DECIDES.get((kind, "sgd"), BOUNDS["sgd"])
    check(reference(kind, False, "sgd", 4), reference(kind, False, "sgd", 1), bound)


@pytest.mark.parametrize("kind", only(["weighted", "rnn"], ROW_BY_ROW))
def test_padded_rows_count_for_nothing(kind: str) -> None:
    """Train on the 51 rows alone, by hand and without a mask."""
    case = CASES[kind]
    dp = rx.DataParallel(case.loss, OPTIMIZERS["sgd"](), mode="single")
    state = dp.init(case.model())

    def mean_loss(params: Any) -> Any:
        model = dp.model(rx.TrainState(0, params, None, state.extras, 0))
        returned = case.loss(model, case.source, jax.random.key(0))
        values = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(values, rx.Weighted):
            return jnp.sum(values.values * values.weights) / jnp.sum(values.weights)
        return jnp.mean(values)

    loss, gradient = jax.value_and_grad(mean_loss)(state.params)
    expected = reference(kind, False, "sgd", 1)
    assert largest_difference(loss, expected["metrics"]["loss"])[0] <= BOUNDS["sgd"]
    difference, path = largest_difference(gradient, expected["gradient"])
    assert difference <= ROUNDING_DECIDES.get((kind, "sgd"), BOUNDS["sgd"]), path
