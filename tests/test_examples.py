"""Each example's first losses, on devices and in modes, against plain JAX on one device."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.tiers import EXHAUSTIVE, only

import replicax as rx

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
TRAINABLE = {"lora": nnx.LoRAParam, "frozen_backbone": "head"}
RANDOM = {"vae"}
"""Their draws are those of a batch's shape, and in per-replica modes each replica's own."""
STEPS = 5
CASES = [(mode, devices) for mode in ("jit", "shard_map", "pmap") for devices in (1, 2, 4)]
KEPT = [("shard_map", 4)]


def load(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def batches(example: Any) -> list[Any]:
    """Of two epochs in order, the third of 20 rows where the others have 32."""
    rows = example.rows()
    count = len(jax.tree.leaves(rows)[0])
    parts = [slice(at, min(at + example.BATCH, count)) for at in range(0, count, example.BATCH)]
    assert parts[-1].stop - parts[-1].start == 20
    cut = [jax.tree.map(lambda leaf, part=part: leaf[part], rows) for part in parts]
    return (2 * cut)[:STEPS]


def mean(returned: Any) -> jax.Array:
    loss = returned[0] if isinstance(returned, tuple) else returned
    if isinstance(loss, rx.Weighted):
        return jnp.sum(loss.values * loss.weights) / jnp.sum(loss.weights)
    return jnp.mean(loss)


def by_hand(name: str, example: Any) -> list[float]:
    """The losses of plain JAX on one device."""
    model, optimizer = example.model(), example.optimizer()
    frozen: Any
    if name == "lora":
        graph, params, frozen = nnx.split(model, nnx.LoRAParam, ...)
    elif name in TRAINABLE:
        frozen, params = dict(model), {"head": model["head"]}
    else:
        frozen, params = {}, model

    def whole(params: Any) -> Any:
        return nnx.merge(graph, params, frozen) if name == "lora" else {**frozen, **params}

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(
            lambda params: mean(example.loss(whole(params), batch, None))
        )(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for batch in batches(example):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses


def with_replicax(name: str, example: Any, mode: str, devices: int) -> list[float]:
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    dp = rx.DataParallel(
        example.loss,
        example.optimizer(),
        mesh=mesh,
        mode=mode,
        trainable=TRAINABLE.get(name),
    )
    state, losses = dp.init(example.model()), []
    for epoch in range(2):
        for batch in dp.feed(example.rows(), 28 if name in RANDOM else example.BATCH, epoch=epoch):
            state, metrics = dp.step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses[:STEPS]


@pytest.mark.parametrize(("mode", "devices"), only(KEPT, CASES))
@pytest.mark.parametrize("name", [name for name in NAMES if name not in RANDOM])
def test_the_first_losses_are_those_of_plain_jax(name: str, mode: str, devices: int) -> None:
    example = load(name)
    found = with_replicax(name, example, mode, devices)
    np.testing.assert_allclose(found, by_hand(name, example), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("devices", only([4], [1, 2, 4]))
@pytest.mark.parametrize("name", sorted(RANDOM))
def test_random_numbers_are_those_of_one_device(name: str, devices: int) -> None:
    example = load(name)
    expected = with_replicax(name, example, "single", 1)
    np.testing.assert_allclose(with_replicax(name, example, "jit", devices), expected, rtol=1e-6)


@EXHAUSTIVE
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    assert capsys.readouterr().out


def test_each_header_says_what_it_shows() -> None:
    assert len(NAMES) >= 8
    for name in NAMES:
        said = (load(name).__doc__ or "").strip().split("\n\n")
        assert len(said) == 2, name
