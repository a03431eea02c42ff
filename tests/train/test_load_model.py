"""The model of a run for predictions: without its optimizer, loss and data, in inference mode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file
from support.figures import refused
from support.stablehlo import called_alone
from support.tiers import EXHAUSTIVE, only

import replicax as rx

RANDOM = np.random.default_rng(0)
ROWS = {"x": RANDOM.normal(size=(24, 4)).astype(np.float32), "y": np.ones(24, np.float32)}


class Network(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.drop(self.norm(x)))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(x))


class Averaging(eqx.Module):
    drop: Any
    norm: Any
    out: Any

    def __init__(self, seed: int) -> None:
        self.drop, self.out = eqx.nn.Dropout(0.5), eqx.nn.Linear(4, 1, key=jax.random.key(seed))
        self.norm = eqx.nn.BatchNorm(4, "rows", mode="batch")

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x, state = self.norm(x, state)
        return self.out(self.drop(x, key=key)), state


def equinox_model(seed: int) -> rx.Stateful:
    return rx.Stateful(*eqx.nn.make_with_state(Averaging)(seed))


def equinox_outputs(model: rx.Stateful, x: Any, key: Any = None) -> Any:
    call = jax.vmap(model.model, (0, None, None), (0, None), axis_name="rows")
    return call(x, model.state, key)


def linen_model(seed: int) -> Any:
    module = Normed()
    return module.bind(module.init(jax.random.key(seed), ROWS["x"]))


def loss(model: Any, batch: Any, key: Any) -> Any:
    if isinstance(model, rx.Stateful):
        found, state = equinox_outputs(model, batch["x"], key)
        return rx.NewState((found[:, 0] - batch["y"]) ** 2, state)
    mode = {"train": key is not None} if isinstance(model, nn.Module) else {}
    return (model(batch["x"], **mode)[:, 0] - batch["y"]) ** 2


def called(model: Any) -> Any:
    if isinstance(model, rx.Stateful):
        return equinox_outputs(model, ROWS["x"])[0]
    return model(ROWS["x"])


HOW: dict[str, Any] = {
    "nnx": {"ema": 0.5, "trainable": "bias"},
    "linen": {"layout": "fsdp"},
    "equinox": {"ema": 0.5},
}
MODELS: dict[str, Callable[[int], Any]] = {
    "nnx": Network,
    "linen": linen_model,
    "equinox": equinox_model,
}


def trained(folder: Path, made: Any, **settings: Any) -> tuple[rx.DataParallel, rx.types.Fit]:
    dp = rx.DataParallel(loss, optax.adam(optax.constant_schedule(0.1)), **settings)
    how = {"batch_size": 8, "epochs": 1, "run_dir": folder, "saving": rx.Saving(every=2)}
    return dp, rx.fit(dp, dp.init(made), ROWS, progress=False, **how)


@pytest.mark.parametrize("kind", only(["nnx", "equinox"], MODELS))
def test_the_model_predicts_as_at_the_end_of_training(kind: str, tmp_path: Path) -> None:
    make = MODELS[kind]
    how = HOW[kind]
    dp, result = trained(tmp_path, make(0), **how)
    found = rx.load_model(tmp_path, make(1))
    wanted = called(dp.model(result.state))
    np.testing.assert_array_equal(called(found), wanted)
    np.testing.assert_array_equal(called(rx.load(tmp_path, dp=dp).model), wanted)
    assert {len(leaf.sharding.device_set) for leaf in arrays(found)} == {1}
    before = rx.load_model(tmp_path / "checkpoints" / "2", make(1))
    assert not np.array_equal(called(before), wanted)
    if "ema" in how:
        averaged = rx.load_model(tmp_path, make(1), ema=True)
        wanted = called(dp.model(result.state, ema=True))
        np.testing.assert_array_equal(called(averaged), wanted)
        assert not np.array_equal(called(averaged), called(found))
    weights = rx.load_weights(before, tmp_path)  # statistics, too
    np.testing.assert_array_equal(called(weights), called(found))
    if kind == "linen":
        with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
            state = manager.restore(3)
        variables = {"params": state["params"], **state["extras"]}
        np.testing.assert_array_equal(Normed().apply(variables, ROWS["x"]), called(found))
    if kind == "nnx":
        rx.save_weights(found, tmp_path / "it.safetensors")
        (tmp_path / "other").touch()
        modes = {(tmp_path / name).stat().st_mode for name in ("it.safetensors", "other")}
        assert len(modes) == 1
        named = unflatten_dict(load_file(tmp_path / "it.safetensors"), sep=".")
        nnx.update(before, nnx.restore_int_paths(named))
        np.testing.assert_array_equal(called(before), called(found))


def arrays(model: Any) -> list[Any]:
    tree = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    tree = model.variables if isinstance(model, nn.Module) else tree
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


@EXHAUSTIVE
def test_the_prediction_runs_where_there_is_no_replicax(tmp_path: Path) -> None:
    trained(tmp_path / "run", Network(0))
    model = rx.load_model(tmp_path / "run", Network(1))
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 4"), "float32")
    exported = jax.export.export(jax.jit(lambda x: model(x)))(shape)
    (tmp_path / "it.stablehlo").write_bytes(exported.serialize())
    found = called_alone(tmp_path / "it.stablehlo", ROWS["x"])
    np.testing.assert_allclose(found, called(model), rtol=1e-4)


def test_a_part_of_the_state_of_a_custom_step_is_enough(tmp_path: Path) -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state["net"], batch, key)
        new = optax.apply_updates(nnx.state(state["net"], nnx.Param), gradient)
        nnx.update(state["net"], new)
        return {**state, "count": state["count"] + 1}, means

    dp = rx.DataParallel(step=step)
    state = dp.init({"net": Network(0), "count": jnp.int32(0)})
    how = {"batch_size": 8, "epochs": 1, "run_dir": tmp_path, "progress": False}
    result = rx.fit(dp, state, ROWS, **how)
    net = dp.model(result.state)["net"]
    net.eval()
    found = rx.load_model(tmp_path, {"net": Network(1)})
    assert found.keys() == {"net"}
    np.testing.assert_array_equal(called(found["net"]), called(net))
    with refused(rx.errors.ConfigError, match=r"other\.norm"):
        rx.load_model(tmp_path, {"other": Network(1)})


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    def plain(model: Any, batch: Any, key: Any) -> Any:
        return (batch["x"] @ model["w"] - batch["y"]) ** 2

    dp = rx.DataParallel(plain, optax.sgd(0.1))
    state = dp.init({"w": np.ones(4, np.float32)})
    rx.fit(dp, state, ROWS, batch_size=24, epochs=1, run_dir=tmp_path, progress=False)
    for model, ema, words in (
        ({"w": jnp.ones(3)}, False, r"params\.w .*\[4\].*\[3\]"),
        ({"w": jnp.ones(4), "b": jnp.ones(4)}, False, r"params\.b\b"),
        ({"w": jnp.ones(4)}, True, r"ema=0\.999"),
        (None, False, r"rx\.load_model\(run_dir, model\)"),
    ):
        with refused(rx.errors.ConfigError, match=words):
            rx.load_model(tmp_path, model, ema=ema)
    model = {"w": jax.device_put(np.zeros(4, np.float32), jax.devices()[3])}
    found = rx.load_model(tmp_path, model)
    assert found["w"].devices() == {jax.devices()[3]}
    other = rx.DataParallel(plain, optax.adam(0.1))
    whole = {"dp": other, "state": other.init(model)}
    for arguments in ({}, {"model": model}, {"state": state}, whole):
        with refused(rx.errors.ConfigError, match=r"rx\.load_model\(run_dir, model\)"):
            rx.load(tmp_path, **arguments)
