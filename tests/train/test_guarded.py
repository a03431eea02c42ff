"""The guarded step: a bad step changes nothing but `step`, on all replicas alike."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from support.cases import BATCH, CASES, DROPOUT_CASES, Case
from support.tiers import EXHAUSTIVE, only
from support.training import assert_near, parallel

import replicax as rx
from replicax.errors import LossError
from replicax.train.files.fingerprint import sha256
from replicax.train.guarded import (
    NOT_FINITE,
    SPIKE,
    SPIKE_SIGMAS,
    SPIKE_WINDOW,
    guarded,
    judged,
    with_losses,
)

RULES = [(r"Dense_0.*kernel", PartitionSpec(None, "data")), ("", PartitionSpec())]
ADAMW = optax.adamw(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAMW)
OPTIMIZERS = {"single": CLIPPED, "exact": ADAMW}  # exact with zero1 takes none that clips
RUNS = [
    ("single", "replicated", 1),
    ("jit", "replicated", 8),
    ("jit", "zero1", 8),
    ("jit", "fsdp", 8),
    ("jit", RULES, 8),
    ("shard_map", "replicated", 8),
    ("pmap", "replicated", 8),
    ("exact", "replicated", 8),
    ("shard_map", "zero1", 8),
    ("shard_map", "fsdp", 8),
    ("exact", "zero1", 8),
]
IDS = [f"{mode}, {layout if isinstance(layout, str) else 'rules'}" for mode, layout, _ in RUNS]
QUICK = ("jit, zero1", "shard_map, fsdp", "exact, replicated")
in_every_mode = pytest.mark.parametrize(
    ("mode", "layout", "devices"),
    [
        pytest.param(*run, id=name, marks=() if name in QUICK else EXHAUSTIVE)
        for run, name in zip(RUNS, IDS, strict=True)
    ],
)


def make(
    case: Case,
    mode: str,
    layout: Any,
    devices: int,
    optimizer: optax.GradientTransformation = CLIPPED,
    **options: Any,
) -> rx.DataParallel:
    settings = {"mode": mode, "layout": layout, "devices": devices, **options}
    return parallel(case.loss, optimizer, **settings)


def batch_of(dp: rx.DataParallel, source: dict[str, np.ndarray], epoch: int = 0) -> Any:
    (batch,) = dp.feed(source, BATCH, shuffle=True, epoch=epoch)
    return batch


def bits(tree: Any) -> list[bytes]:
    def data(leaf: Any) -> Any:
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if key else leaf

    return [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in data(leaf).addressable_shards
    ]


def poisoned(source: dict[str, np.ndarray], rows: list[int]) -> dict[str, np.ndarray]:
    x = source["x"].copy()
    x[rows] = np.nan
    return {**source, "x": x}


def without_step(state: rx.TrainState) -> rx.TrainState:
    return dataclasses.replace(state, step=())


def three_steps(
    dp: rx.DataParallel, case: Case, bad: dict[str, np.ndarray] | None
) -> rx.TrainState:
    """Take a good step, one on `bad` (None: it is only counted), and a good one."""
    state = dp.init(case.model())
    state, _ = dp.step(state, batch_of(dp, case.source))
    if bad is None:
        state = dataclasses.replace(state, step=state.step + 1)
    else:
        state, _ = dp.step(state, batch_of(dp, bad, 1))
    state, _ = dp.step(state, batch_of(dp, case.source, 2))
    return state


@functools.cache
def undisturbed(mode: str) -> list[np.ndarray]:
    """Good steps alone, on one device, without a guard."""
    case = CASES["linen"]
    state = three_steps(make(case, mode, "replicated", 1, OPTIMIZERS[mode]), case, None)
    return jax.tree.leaves(jax.device_get(without_step(state)))


@pytest.mark.promise("checkpoints.bad-steps")
@in_every_mode
def test_a_bad_step_changes_nothing_but_step(mode: str, layout: Any, devices: int) -> None:
    case = CASES["linen"]
    expected = "exact" if mode == "exact" else "single"  # its BatchNorm is that of a micro-shard
    plain = make(case, mode, layout, devices, OPTIMIZERS[expected])
    state = plain.init(case.model())
    dp = guarded(plain, state)
    state, metrics = dp.step(state, batch_of(dp, case.source))
    assert not bool(metrics[NOT_FINITE])
    before, extras = bits(without_step(state)), bits(state.extras)
    for rows in ([7], list(range(51))):  # on one replica, and on all
        state, metrics = dp.step(state, batch_of(dp, poisoned(case.source, rows), 1))
        assert bool(metrics[NOT_FINITE])
        assert np.isnan(metrics["loss"])
        assert bits(without_step(state)) == before
    assert int(state.step) == 3
    state, metrics = dp.step(state, batch_of(dp, case.source, 2))
    assert not bool(metrics[NOT_FINITE])
    assert bits(state.extras) != extras
    assert_near(jax.tree.leaves(without_step(state)), undisturbed(expected), rtol=2e-5)


@functools.cache
def digest(devices: int, *, bad: bool) -> str:
    """Return the digest after a good step, a bad one (or only counted), and a good one."""
    case = DROPOUT_CASES["nnx"]
    dp = make(case, "exact", "replicated", devices)
    if not bad:
        return sha256(three_steps(dp, case, None))
    twin = guarded(dp, dp.init(case.model()))
    return sha256(three_steps(twin, case, poisoned(case.source, [20])))


@pytest.mark.promise("exact.skipped-steps")
@pytest.mark.parametrize("devices", only([8], [1, 2, 8]))
@pytest.mark.usefixtures("optimized")
def test_exact_has_the_same_bits_on_any_number_of_devices(devices: int) -> None:
    assert digest(devices, bad=True) == digest(1, bad=False)


@pytest.mark.parametrize(
    ("mode", "layout", "copies"),
    only(
        [("jit", "zero1", 2), ("shard_map", "fsdp", 1.5)],
        [
            ("shard_map", "replicated", 3),
            ("jit", "replicated", 3),
            ("jit", "zero1", 2),
            ("shard_map", "zero1", 2),
            ("shard_map", "fsdp", 1.5),
        ],
    ),
)
def test_it_takes_no_more_memory(mode: str, layout: str, copies: float) -> None:
    model = {f"w{n}": jnp.zeros((256, 256)) for n in range(4)}

    def loss(model: Any, batch: Any, key: Any) -> Any:
        x = batch["x"]
        for weights in model.values():
            x = jnp.tanh(x @ weights)
        return jnp.mean(x**2, -1)

    source = {"x": np.zeros((16, 256), np.float32)}
    dp = make(Case(lambda: model, loss, source), mode, layout, 2)
    state = dp.init(model)
    batch = next(iter(dp.feed(source, 16)))
    plain, twin = (
        each.lower(state, batch).compile().memory_analysis() for each in (dp, guarded(dp, state))
    )
    assert twin.alias_size_in_bytes == plain.alias_size_in_bytes
    copy_of_params = 4 * 256 * 256 * 4
    assert round(plain.alias_size_in_bytes / copy_of_params, 2) == copies
    assert twin.temp_size_in_bytes < plain.temp_size_in_bytes + copy_of_params / 2


@pytest.mark.parametrize(
    ("slope", "bad"), [(1e18, False), (3e19, True), (np.inf, True), (np.nan, True), (0.0, False)]
)
@pytest.mark.parametrize("mode", ["jit", "shard_map", "exact"])
def test_every_element_of_the_gradient_is_looked_at(mode: str, slope: float, bad: bool) -> None:
    dp = in_one_element(mode)
    state = dp.init({"v": jnp.zeros(3), "w": jnp.ones((2, 5))})
    dp = guarded(dp, state)
    before = bits(state.params)
    slopes = np.zeros(16, np.float32)
    slopes[11] = slope
    names = judged(dp, state)
    state, metrics = dp.step(state, {"slope": slopes})
    assert float(metrics["loss"]) == 1.0
    verdict = int(metrics[NOT_FINITE])
    assert ["['w']" in name for name in names[verdict - 1 : verdict]] == [True] * bad
    assert verdict >= 0
    assert (bits(state.params) == before) == (bad or not slope)


@jax.custom_vjp
def tilted(weight: jax.Array, slope: jax.Array) -> jax.Array:
    """1 a row, with the gradient `slope`."""
    return jnp.ones_like(slope)


tilted.defvjp(
    lambda weight, slope: (jnp.ones_like(slope), slope),
    lambda slope, g: (jnp.sum(g * slope), jnp.zeros_like(slope)),
)


@functools.cache
def in_one_element(mode: str) -> rx.DataParallel:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return tilted(model["w"][1, -1], batch["slope"])

    return rx.DataParallel(loss, optax.sgd(1e-18), mode=mode)


def test_a_batch_without_any_weight_is_not_bad() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return rx.Weighted(model["w"] * batch["x"], batch["x"] * 0)

    dp = rx.DataParallel(loss, optax.sgd(0.1))
    state = with_losses(dp.init({"w": jnp.float32(1.0)}))
    state, metrics = guarded(dp, state).step(state, {"x": np.ones(16, np.float32)})
    assert np.isnan(metrics["loss"])
    assert not bool(metrics[NOT_FINITE])
    assert not bool(metrics[SPIKE])
    assert (np.asarray(state.losses) == np.finfo(np.float32).max).all()


def test_only_the_twin_goes_on_from_a_first_loss_that_is_nan() -> None:
    case = CASES["pytree"]
    dp = make(case, "jit", "replicated", 8)
    batch = batch_of(dp, poisoned(case.source, [0]))
    state = dp.init(case.model())
    twin = guarded(dp, state)
    assert twin is guarded(dp, state)
    _, metrics = twin.step(state, batch)
    assert bool(metrics[NOT_FINITE])
    with pytest.raises(LossError, match=r"nan in\b.*first step"):
        dp.step(dp.init(case.model()), batch)


def plus_weight(model: Any, batch: Any, key: Any) -> Any:
    """The loss is that of the batch, the gradient is 1."""
    return batch["x"] + (model["w"] - jax.lax.stop_gradient(model["w"]))


@functools.cache
def to_watch(mode: str, devices: int) -> rx.DataParallel:
    return parallel(plus_weight, optax.sgd(0.25), mode=mode, devices=devices)


def watched(mode: str = "jit", devices: int = 8) -> tuple[rx.DataParallel, rx.TrainState]:
    dp = to_watch(mode, devices)
    state = with_losses(dp.init({"w": jnp.float32(1.0)}))
    return guarded(dp, state), state


def history() -> np.ndarray:
    """Losses with few digits, so that the sum of a batch is exact."""
    losses = np.random.default_rng(0).normal(3.0, 0.1, SPIKE_WINDOW)
    return (np.round(losses * 1024) / 1024).astype(np.float32)


def far(window: np.ndarray, sigmas: float) -> float:
    """Return a loss that many standard deviations above the window's mean."""
    wide = window.astype(np.float64)
    return float(wide.mean() + sigmas * wide.std(ddof=1))


def step_on(dp: rx.DataParallel, state: rx.TrainState, loss: float) -> tuple[rx.TrainState, Any]:
    state, metrics = dp.step(state, {"x": np.full(8, loss, np.float32)})
    return state, (bool(metrics[SPIKE]), bool(metrics[NOT_FINITE]))


def test_a_spike_is_skipped_once_the_window_is_full() -> None:
    dp, state = watched()
    window = history()
    window[100] = 50.0  # before there are enough to compare with
    for loss in window:
        state, found = step_on(dp, state, float(loss))
        assert found == (False, False)
    window[100] = 3.0
    for loss in history()[:101]:  # until that one has left
        state, found = step_on(dp, state, float(loss))
        assert found == (False, False)
    seen = np.concatenate([history()[101:], history()[:101]])
    np.testing.assert_array_equal(state.losses, seen)
    weight = float(state.params["w"])
    state, found = step_on(dp, state, far(seen, SPIKE_SIGMAS + 0.01))
    assert found == (True, False)
    np.testing.assert_array_equal(state.losses, seen)
    assert float(state.params["w"]) == weight
    state, found = step_on(dp, state, far(seen, SPIKE_SIGMAS - 0.01))
    assert found == (False, False)
    assert float(state.params["w"]) == weight - 0.25
    np.testing.assert_array_equal(state.losses[:-1], seen[1:])
    assert int(state.step) == 2 * SPIKE_WINDOW - 27 + 2
    assert dp.evaluate(state, [{"x": np.ones(8, np.float32)}])["loss"] == 1.0


def test_a_loss_that_is_not_finite_is_no_spike_and_not_remembered() -> None:
    dp, state = watched()
    for loss in (np.nan, np.inf):
        state, found = step_on(dp, state, loss)
        assert found == (False, True)
    assert (np.asarray(state.losses) == np.finfo(np.float32).max).all()
    for loss in history():
        state, _ = step_on(dp, state, float(loss))
    for loss in (np.nan, np.inf):
        state, found = step_on(dp, state, loss)
        assert found == (False, True)
    np.testing.assert_array_equal(state.losses, history())


@pytest.mark.parametrize("mode", ["jit", "exact"])
def test_a_window_that_is_not_full_is_finite_for_debugging(mode: str) -> None:
    with jax.debug_nans(True), jax.debug_infs(True):
        dp, state = watched(mode, 2)
        for loss in (*history()[:3], 50.0):
            state, found = step_on(dp, state, float(loss))
            assert found == (False, False)


@pytest.mark.parametrize("mode", ["single", "shard_map", "pmap", "exact"])
def test_spikes_are_told_alike_in_every_mode(mode: str) -> None:
    dp, state = watched(mode)
    where = state.losses.sharding
    state = dataclasses.replace(state, losses=jax.device_put(history(), where))
    state, found = step_on(dp, state, far(history(), SPIKE_SIGMAS + 0.01))
    assert found == (True, False)
    state, found = step_on(dp, state, far(history(), SPIKE_SIGMAS - 0.01))
    assert found == (False, False)


@EXHAUSTIVE
@pytest.mark.usefixtures("optimized")
def test_exact_has_the_same_bits_where_it_looks_for_spikes() -> None:
    losses = [*history(), 3.1, 99.0, 2.9, np.nan, 3.0]
    digests = set()
    for devices in (1, 2, 8):
        dp, state = watched("exact", devices)
        for loss in losses:
            state, _ = step_on(dp, state, float(loss))
        digests.add(sha256(state))
    assert len(digests) == 1


def test_a_window_can_be_described_and_is_made_once() -> None:
    dp = rx.DataParallel(plus_weight, optax.sgd(0.25))
    model = {"w": jnp.float32(1.0)}
    described, state = with_losses(dp.abstract_state(model)), with_losses(dp.init(model))
    assert with_losses(state) is state
    for shape, leaf in zip(jax.tree.leaves(described), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        assert shape.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
