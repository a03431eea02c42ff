"""The caller's mesh, settings and threads do not change a step."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from support import training
from support.tiers import only

import replicax as rx
from replicax.errors import ConfigError, StateError

DATA = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"] - 1) ** 2


def parallel(mode: str = "jit", devices: int = 4, **options: Any) -> rx.DataParallel:
    return training.parallel(loss, optax.sgd(0.1), mode=mode, devices=devices, **options)


def callers(kind: str) -> contextlib.AbstractContextManager[Any]:
    """A mesh set by the caller."""
    if kind == "none":
        return contextlib.nullcontext()
    if kind == "own":
        return jax.set_mesh(rx.make_mesh(devices=jax.devices()[:4]))
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    return jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(types[kind],) * 2))


def everything(mode: str, kind: str, folder: Path) -> list[float]:
    """Return the numbers of a `DataParallel` and a run within the caller's mesh."""
    found = []
    with callers(kind):
        model = {"w": jnp.arange(3.0)}
        dp = parallel(mode, ema=0.5)
        state, metrics = dp.step(dp.init(model), DATA)
        found.append(float(metrics["loss"]))
        for batch in dp.feed(DATA, 8, prefetch=0):
            state, metrics = dp.step(state, batch)
        found.append(dp.evaluate(state, dp.feed(DATA, 8), ema=True)["loss"])
        found += dp.predict(state, [DATA], lambda m, b, k: b["x"] @ m["w"]).tolist()
        dp.lower(model, DATA)
        settings: dict[str, Any] = {"batch_size": 8, "progress": False, "run_dir": folder}
        guard, saving = rx.Guard(skip_spikes=True), rx.Saving(every=2)
        with rx.Run(
            dp, dp.init(model), DATA, steps=3, guard=guard, saving=saving, **settings
        ) as run:
            for batch in run:
                run.step(batch)
        loaded = rx.load(folder, dp=dp, state=dp.abstract_state(model))
        found += np.asarray(dp.model(loaded.state)["w"]).tolist()
    return found


@pytest.mark.promise("outside.callers-jax")
@pytest.mark.parametrize("kind", ["auto", "explicit", "own"])
@pytest.mark.parametrize(
    "mode", only(["shard_map", "single"], ["jit", "shard_map", "single", "pmap"])
)
def test_a_mesh_that_the_caller_has_set_changes_nothing(
    mode: str, kind: str, tmp_path: Path
) -> None:
    wanted = everything(mode, "none", tmp_path / "plain")
    np.testing.assert_array_equal(everything(mode, kind, tmp_path / "within"), wanted)


def test_a_loss_may_name_the_axes_of_its_own_mesh() -> None:
    def constrained(model: Any, batch: Any, key: Any) -> Any:
        rows = jax.lax.with_sharding_constraint(batch["x"], PartitionSpec("data"))
        return loss(model, {"x": rows}, key)

    with callers("own"):
        dp = parallel().replace(loss=constrained)
        _, metrics = dp.step(dp.init({"w": jnp.ones(3)}), DATA)
    assert float(metrics["loss"]) == pytest.approx(
        float(loss({"w": np.ones(3)}, DATA, None).mean())
    )


def test_a_step_inside_jit_is_refused_within_a_mesh_too() -> None:
    dp = parallel()
    state = dp.init({"w": jnp.ones(3)})
    with callers("auto"), pytest.raises(StateError, match=r"inside jax\.jit"):
        jax.jit(lambda x: dp.step(state, {"x": x})[1]["loss"])(DATA["x"])


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_without_jit_there_is_one_device(mode: str) -> None:
    with jax.disable_jit():
        one = parallel(mode, devices=1, accumulate=2)
        _, metrics = one.step(one.init({"w": jnp.ones(3)}), DATA)
        with pytest.raises(ConfigError, match=r"jax_disable_jit\b.*\b4\b"):
            parallel().init({"w": jnp.ones(3)})
        with pytest.raises(ConfigError, match="jax_disable_jit"):
            parallel("exact", 1).init({"w": jnp.ones(3)})
    assert float(metrics["loss"]) == pytest.approx(
        float(loss({"w": np.ones(3)}, DATA, None).mean())
    )


@pytest.mark.promise("outside.callers-jax")
def test_threads_take_turns() -> None:
    dp, found = parallel(), {}

    def train(number: int) -> None:
        state = dp.init({"w": jnp.zeros(3)})
        for _ in range(30):
            state, _ = dp.step(state, {"x": DATA["x"][: 8 + 4 * (number % 2)]})
        found[number] = dp.evaluate(state, [DATA])["loss"], dp.model(state)["w"].tolist()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[2]
    assert found[1] == found[3]
