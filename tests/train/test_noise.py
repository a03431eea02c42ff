"""`noise_probe`: its estimates are unbiased, and the same on any devices and in any mode."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import CASES, DROPOUT_CASES, Case
from support.tiers import EXHAUSTIVE, exhaustive, only

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.train.hooks.noise_scale import PARTS, noise_probe

DIM = 5
MEAN = np.array([1.0, -0.5, 0.0, 2.0, 0.5], np.float32)
DEVIATION = 1.5


def half_square(model: Any, batch: Any, key: Any) -> Any:
    """The gradient of a row x is theta - x."""
    return 0.5 * jnp.sum((model["theta"] - batch["x"]) ** 2, axis=1)


def weighted(model: Any, batch: Any, key: Any) -> Any:
    return rx.Weighted(half_square(model, batch, key), batch["weight"])


@lru_cache(maxsize=4)
def quadratic(loss: Any, devices: int = 1) -> tuple[rx.DataParallel, Any, Any]:
    """At theta = 0, G is minus the mean of x, and the covariance that of x."""
    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=rx.make_mesh(data=devices))
    state = dp.init({"theta": jnp.zeros(DIM)})
    return dp, state, noise_probe(dp, state)


def take(loss: Any, data: dict[str, np.ndarray], devices: int = 1) -> tuple[float, float, float]:
    dp, state, probe = quadratic(loss, devices)
    (batch,) = dp.feed(data, len(data["x"]), prefetch=1)
    sample = probe(state, batch)
    return float(sample.squared_gradient_norm), float(sample.trace), float(sample.rows)


def draw(generator: np.random.Generator, rows: int) -> np.ndarray:
    drawn = MEAN + DEVIATION * generator.normal(size=(rows, DIM))
    return drawn.astype(np.float32)


def measure(case: Case, rows: int, devices: int, **options: Any) -> tuple[float, float]:
    mesh = rx.make_mesh(data=devices)
    dp = rx.DataParallel(case.loss, optax.sgd(0.1), mesh=mesh, **options)
    state = dp.init(case.model(), seed=3)
    batch = next(iter(dp.feed(case.source, rows)))
    sample = noise_probe(dp, state)(state, batch)
    return float(sample.squared_gradient_norm), float(sample.trace)


@pytest.mark.parametrize("devices", only([4], [1, 4]))
def test_unbiased_with_parts_of_other_sizes(devices: int) -> None:
    """6 rows in 4 parts, and on 4 devices 2 rows of padding."""
    generator = np.random.default_rng(1)
    found = np.array(
        [take(half_square, {"x": draw(generator, 6)}, devices)[:2] for _ in range(600)]
    )
    truth = np.sum(MEAN.astype(np.float64) ** 2), DIM * DEVIATION**2
    error = found.std(0) / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - truth) < 4 * error).all()
    assert (error < 0.06 * np.array(truth)).all()


def test_weights_count_as_so_many_rows() -> None:
    """Each row twice, and each row with weight 2: the same |G|² and the same noise of the batch."""
    x = draw(np.random.default_rng(2), 16)
    weight = np.random.default_rng(3).uniform(0.1, 10, 16).astype(np.float32)
    once = take(weighted, {"x": x, "weight": weight})
    twice = take(weighted, {"x": x, "weight": 2 * weight})
    np.testing.assert_allclose(once, twice, rtol=1e-5)
    means = np.array([np.average(x[k::PARTS], 0, weight[k::PARTS]) for k in range(PARTS)])
    weights = np.array([weight[k::PARTS].sum() for k in range(PARTS)])
    whole = np.average(means, 0, weights)
    between = np.sum(weights * np.sum((means - whole) ** 2, 1)) / (PARTS - 1) / weights.sum()
    expected = np.sum(whole**2) - between, 16 * between, 16
    np.testing.assert_allclose(once, expected, rtol=1e-4)


def noisy(model: Any, batch: Any, key: Any) -> Any:
    return half_square(model, batch, key) + model["theta"] @ jax.random.normal(key, (DIM,))


def test_parts_draw_random_numbers_of_their_own() -> None:
    """Otherwise the noise of Dropout would be equal in all parts, and count as gradient."""
    same_rows = {"x": np.ones((8, DIM), np.float32)}
    assert take(half_square, same_rows)[1] == 0
    assert take(noisy, same_rows)[1] > 0.1


def test_small_noise_beside_a_large_gradient_is_not_lost() -> None:
    """The sums of squares agree in all digits of float32."""
    noise = np.zeros((8, DIM), np.float32)
    noise[::PARTS, 0] = 0.25  # exact in float32 beside 1000
    _, trace, _ = take(half_square, {"x": 1000 + noise})
    # The parts' means are 0.25, 0, 0, 0 above 1000; each is of 2 rows.
    assert trace == pytest.approx(2 * np.var([0.25, 0, 0, 0], ddof=1), rel=1e-3)


@pytest.mark.parametrize("weight", [[1, 0, 0, 0, 1, 0, 0, 0], [0] * 8])
def test_fewer_than_two_parts_with_weight_tell_nothing(weight: list[float]) -> None:
    x = draw(np.random.default_rng(4), 8)
    square, trace, _ = take(weighted, {"x": x, "weight": np.float32(weight)})
    assert np.isnan([square, trace]).all()


def test_a_batch_with_fewer_rows_than_parts() -> None:
    x = draw(np.random.default_rng(5), 2).astype(np.float64)
    square, trace, rows = take(half_square, {"x": x.astype(np.float32)})
    assert square == pytest.approx(float(x[0] @ x[1]), rel=1e-5)
    assert (trace, rows) == (pytest.approx(np.sum((x[0] - x[1]) ** 2) / 2, rel=1e-5), 2)


WAYS = [
    (8, {}),
    (8, {"layout": "fsdp"}),
    (8, {"mode": "shard_map"}),
    exhaustive((2, {})),
    exhaustive((3, {})),
    exhaustive((8, {"mode": "pmap"})),
    exhaustive((4, {"mode": "exact"})),
    exhaustive((8, {"layout": "zero1"})),
    exhaustive((8, {"mode": "shard_map", "layout": "zero1"})),
    (8, {"mode": "shard_map", "layout": "fsdp"}),
    exhaustive((2, {"mode": "shard_map", "accumulate": 8})),
]


@lru_cache(maxsize=1)
def on_one_device() -> tuple[float, float]:
    return measure(CASES["weighted"], 51, 1, mode="single")


@pytest.mark.parametrize(("devices", "options"), WAYS)
def test_the_same_on_any_devices_in_any_mode(devices: int, options: dict[str, Any]) -> None:
    """51 rows of unlike weights, which need other padding on each number of devices."""
    found = measure(CASES["weighted"], 51, devices, **options)
    np.testing.assert_allclose(found, on_one_device(), rtol=1e-5)


@EXHAUSTIVE
def test_masks_and_statistics_are_the_same_on_any_devices() -> None:
    """Dropout and BatchNorm, with rows that need no padding."""
    case = DROPOUT_CASES["nnx"]
    single = measure(case, 32, 1, mode="single")
    assert single != pytest.approx(measure(CASES["nnx"], 32, 1, mode="single"), rel=0.01)
    for devices, mode in ((8, "jit"), (8, "shard_map"), (4, "exact")):
        found = measure(case, 32, devices, mode=mode)
        np.testing.assert_allclose(found, single, rtol=2e-4, err_msg=f"{devices} {mode}")


def test_devices_share_the_rows() -> None:
    """Parts of 9 rows: the compiler might let each device compute rows that do not divide."""
    case, flops = CASES["pytree"], []
    source = {name: values[:36] for name, values in case.source.items()}
    for devices in (1, 2):
        mesh = rx.make_mesh(data=devices)
        dp = rx.DataParallel(case.loss, optax.sgd(0.1), mesh=mesh)
        state = dp.init(case.model())
        batch = next(iter(dp.feed(source, 36)))
        compiled = noise_probe(dp, state).lower(state, batch).compile()
        flops.append(inspect(compiled).flops)
    assert flops[1] < 0.6 * flops[0]


def test_one_reduction_a_part_and_room_for_few_gradients() -> None:
    width = 512

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.sum(jnp.tanh(batch["x"] @ model["kernel"]), axis=1)

    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=rx.make_mesh(data=2))
    state = dp.init({"kernel": jnp.ones((width, width))})
    batch = next(iter(dp.feed({"x": np.ones((16, width), np.float32)}, 16)))
    program = inspect(noise_probe(dp, state).lower(state, batch).compile())
    gradient = 4 * width * width
    assert {each.kind for each in program.collectives} == {"all-reduce"}
    moved = sum(each.bytes for each in program.collectives)
    assert PARTS * gradient <= moved < 1.001 * PARTS * gradient
    assert program.memory is not None
    assert program.memory.temporaries < 3.1 * gradient
