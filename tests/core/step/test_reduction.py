"""Reductions: rounded to bfloat16 on the wire, and custom ones with a state.

Contributions are whole numbers of more than bfloat16's 8 bits, whose sums float32 holds exactly:
NumPy's result on one device is the same to the last bit.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.tiers import exhaustive, only
from support.training import assert_near, parallel, train

import replicax as rx
from replicax.analysis.collectives import wire_bytes
from replicax.analysis.compiled import inspect
from replicax.core.step.base import StepSums
from replicax.core.step.reduction import REDUCTIONS
from replicax.train.files.fingerprint import sha256

REPLICAS = 8
ROWS = 32
BFLOAT16 = jnp.dtype(jnp.bfloat16)
PyTree = Any


def data() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0).integers(-1000, 1000, (ROWS, 19)).astype(np.float32)
    return {"x": numbers[:, :13], "u": numbers[:, 13:16] + 1j * numbers[:, 16:]}


def model() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(13), "z": jnp.zeros(3, jnp.complex64)}


def linear(model: Any, batch: Any, key: Any) -> Any:
    values = batch["x"] @ model["w"] + (batch["u"] @ model["z"]).real
    return values, {"largest": jnp.abs(batch["x"]).max(axis=1)}


def parts(count: int) -> list[dict[str, np.ndarray]]:
    """Return the gradient of the sum over each of `count` equal runs of the rows."""

    def total(model: Any, batch: Any) -> jax.Array:
        return jnp.sum(linear(model, batch, None)[0])

    split = {name: np.split(leaf, count) for name, leaf in data().items()}
    blocks = [dict(zip(split, block, strict=True)) for block in zip(*split.values(), strict=True)]
    return [jax.device_get(jax.grad(total)(model(), block)) for block in blocks]


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(values):
        return to_bfloat16(values.real) + 1j * to_bfloat16(values.imag)
    return values.astype(BFLOAT16).astype(np.float32)


def added_at_once(leaves: list[np.ndarray]) -> np.ndarray:
    return to_bfloat16(np.sum([to_bfloat16(leaf) for leaf in leaves], axis=0))


def added_by_tree(leaves: list[np.ndarray]) -> np.ndarray:
    rounded = [to_bfloat16(leaf) for leaf in leaves]
    while len(rounded) > 1:
        pairs = zip(rounded[0::2], rounded[1::2], strict=True)
        rounded = [to_bfloat16(left + right) for left, right in pairs]
    return rounded[0]


def data_parallel(mode: str, devices: int = REPLICAS, **options: Any) -> rx.DataParallel:
    given = {"loss": linear, "optimizer": optax.sgd(1.0), **options}
    return parallel(mode=mode, devices=devices, **given)


@pytest.mark.parametrize(
    ("mode", "devices", "added"),
    [
        ("shard_map", 8, added_at_once),
        exhaustive(("pmap", 8, added_at_once)),
        ("exact", 8, added_by_tree),
        ("exact", 2, added_by_tree),
        exhaustive(("exact", 1, added_by_tree)),
    ],
)
def test_bfloat16_rounds_each_contribution_and_their_sum(
    mode: str, devices: int, added: Callable[[list[np.ndarray]], np.ndarray]
) -> None:
    dp = data_parallel(mode, devices, reduction="bfloat16")
    state, metrics = dp.step(dp.init(model()), data())
    expected = jax.tree.map(lambda *leaves: -added(list(leaves)) / ROWS, *parts(REPLICAS))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), expected)
    exactly = np.sum([part["w"] for part in parts(REPLICAS)], axis=0) / -ROWS
    assert np.any(state.params["w"] != exactly)
    assert metrics["largest"] == np.abs(data()["x"]).max(axis=1).mean()


@pytest.mark.parametrize(
    ("mode", "added", "roundings"), [("exact", added_by_tree, 4), ("shard_map", added_at_once, 2)]
)
def test_the_error_is_within_its_bound_and_near_it(
    mode: str, added: Callable[[list[np.ndarray]], np.ndarray], roundings: int
) -> None:
    numbers = list(np.random.default_rng(1).normal(size=(REPLICAS, 100_000)).astype(np.float32))
    errors = np.abs(added(numbers) - np.sum(numbers, axis=0, dtype=np.float64))
    share = np.max(errors / np.sum(np.abs(numbers), axis=0))
    bound = REDUCTIONS["bfloat16"].error(roundings)
    assert bound / 3 < share <= bound
    assert REDUCTIONS["float32"].error(roundings) == 0


def two_layers(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(jnp.tanh(batch["x"] @ model["first"]) @ model["last"], axis=1)


@pytest.mark.parametrize("mode", only(["shard_map"], ["shard_map", "pmap", "exact"]))
def test_bfloat16_halves_the_bytes_on_the_wire(mode: str) -> None:
    network = {"first": jnp.ones((100, 500)), "last": jnp.ones((500, 100))}

    def sent(reduction: str) -> float:
        dp = data_parallel(mode, loss=two_layers, reduction=reduction)
        lowered = dp.lower(network, {"x": np.ones((ROWS, 100), np.float32)})
        collectives = inspect(lowered.compile()).collectives
        return sum(wire_bytes(each, REPLICAS) for each in collectives)

    assert 0.5 <= sent("bfloat16") / sent("float32") <= 0.51


# Custom reductions.


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """Sends `compress` of the gradient and what was left over before, and keeps the rest.

    Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes".
    """

    compress: Callable[[Any, Any], Any]
    """`compress(numpy or jax.numpy, leaf)`."""

    def init(self, params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)

    def __call__(self, sums: StepSums, state: PyTree, axis: str) -> tuple[StepSums, PyTree]:
        whole = jax.tree.map(jnp.add, sums.gradient, state)
        sent = jax.tree.map(lambda leaf: self.compress(jnp, leaf), whole)
        total = lax.psum(StepSums(sent, sums.weighted), axis)
        return total, jax.tree.map(jnp.subtract, whole, sent)


def largest_quarter(np: Any, leaf: Any) -> Any:
    limit = np.sort(np.abs(leaf).ravel())[-max(1, leaf.size // 4)]
    return np.where(np.abs(leaf) >= limit, leaf, 0)


def signs(np: Any, leaf: Any) -> Any:
    return np.sign(leaf) * np.mean(np.abs(leaf))


ZEROS = {"w": jnp.zeros(12), "b": jnp.zeros(1)}


def regression(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"] + model["b"] - batch["y"]) ** 2 / 2


def points() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    x = random.normal(size=(ROWS, 12)).astype(np.float32)
    return {"x": x, "y": (x @ random.normal(size=12) + 1).astype(np.float32)}


def trained_in_numpy(
    compress: Callable[[Any, Any], Any], steps: int, replicas: int, rate: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parameters and residuals, `[replicas, ...]`, in float64."""
    params = {"w": np.zeros(12), "b": np.zeros(1)}
    residuals = {name: np.zeros((replicas, *leaf.shape)) for name, leaf in params.items()}
    x, y = (np.split(leaf.astype(np.float64), replicas) for leaf in points().values())
    for _ in range(steps):
        total = {name: np.zeros_like(leaf) for name, leaf in params.items()}
        for replica in range(replicas):
            error = x[replica] @ params["w"] + params["b"] - y[replica]
            gradient = {"w": error @ x[replica] / ROWS, "b": error.sum(keepdims=True) / ROWS}
            for name, leaf in gradient.items():
                whole = leaf + residuals[name][replica]
                sent = compress(np, whole)
                residuals[name][replica] = whole - sent
                total[name] += sent
        params = {name: leaf - rate * total[name] for name, leaf in params.items()}
    return params, residuals


def fed_back(compress: Callable[[Any, Any], Any], **settings: Any) -> rx.DataParallel:
    return parallel(regression, optax.sgd(0.1), reduction=ErrorFeedback(compress), **settings)


@pytest.mark.parametrize("mode", only(["shard_map"], ["shard_map", "pmap"]))
@pytest.mark.parametrize("compress", [largest_quarter, signs])
def test_compression_with_error_feedback(mode: str, compress: Callable[[Any, Any], Any]) -> None:
    dp = fed_back(compress, mode=mode)
    state, _ = train(dp, ZEROS, [points()] * 5)
    params, residuals = trained_in_numpy(compress, 5, 4, 0.1)
    assert_near((state.params, state.reduction), (params, residuals), rtol=1e-4, atol=1e-5)
    assert state.reduction["w"].shape == (4, 12)
    assert np.ptp(residuals["w"], axis=0).min() > 1e-3


def trained_by_fit(steps: int, run_dir: Path, devices: int = 4) -> rx.TrainState:
    dp = fed_back(signs, mode="shard_map", devices=devices)
    options: dict[str, Any] = {"batch_size": ROWS // 2, "run_dir": run_dir, "progress": False}
    return rx.fit(dp, dp.init(ZEROS), points(), steps=steps, **options).state


def test_a_run_resumes_with_its_residuals(tmp_path: Path) -> None:
    whole = trained_by_fit(4, tmp_path / "whole")
    trained_by_fit(3, tmp_path / "parts")
    assert sha256(trained_by_fit(4, tmp_path / "parts")) == sha256(whole)
    assert np.all(np.any(whole.reduction["w"], axis=1))
    with pytest.raises(rx.errors.ConfigError, match=r"reduction\.w .*float32\[4, 12\].*of devices"):
        trained_by_fit(6, tmp_path / "parts", devices=2)


@pytest.mark.parametrize("mode", ["jit", "single", "exact"])
def test_modes_that_cannot_take_it_refuse(mode: str) -> None:
    with pytest.raises(rx.errors.ConfigError, match="shard_map"):
        data_parallel(mode, 1, reduction=ErrorFeedback(signs))
