"""A state that one `DataParallel` made, in another one that was never given the model."""

import copy
import dataclasses
import pickle
from functools import partial
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
from support.tiers import only
from support.training import assert_near, normals, parallel

import replicax as rx

ROWS = {"x": normals(0)(16, 4), "y": np.linspace(0, 1, 16, dtype=np.float32)}
MODEL = {"w": jnp.ones((4, 8)), "v": jnp.full(8, 0.1)}


def plain(model: Any, batch: Any, key: Any) -> Any:
    return (jnp.tanh(batch["x"] @ model["w"]) @ model["v"] - batch["y"]) ** 2


def called(model: Any, batch: Any, key: Any) -> Any:
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def mapped(model: Any, batch: Any, key: Any) -> Any:
    return (jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.norm(x))


def linen() -> Any:
    module = nn.Dense(1)
    return module.bind(module.init(jax.random.key(0), ROWS["x"]))


MODELS: dict[str, tuple[Any, Any]] = {
    "pytree": (plain, lambda: MODEL),
    "nnx": (called, lambda: Net(nnx.Rngs(0))),
    "equinox": (mapped, lambda: eqx.nn.MLP(4, 1, 4, 1, key=jax.random.key(0))),
    "linen": (called, linen),
}
PLACES: list[dict[str, Any]] = [
    {"mode": "jit", "layout": "fsdp"},
    {"mode": "single"},
    {"mode": "shard_map", "layout": "zero1"},
    {"mode": "exact", "micro_shards": 8},
    {"mode": "pmap"},
    {"mode": "jit", "devices": 2},
]


def make(loss: Any = plain, optimizer: Any = None, **settings: Any) -> rx.DataParallel:
    return parallel(loss, optimizer or optax.adam(0.1), **settings)


def trained(dp: rx.DataParallel, model: Any = MODEL) -> rx.TrainState:
    return dp.step(dp.init(model), ROWS)[0]


near = partial(assert_near, atol=0)


@pytest.mark.parametrize("place", only(PLACES[:4], PLACES), ids=str)
def test_a_state_goes_on_in_another_mode_layout_or_number_of_devices(place: dict[str, Any]) -> None:
    dp = make()
    wanted, metrics = dp.step(trained(dp), ROWS)
    state, found = make(**place).step(trained(make()), ROWS)
    near((found["loss"], state.params), (metrics["loss"], wanted.params))
    assert make().evaluate(state, ROWS)["loss"] == pytest.approx(dp.evaluate(wanted, ROWS)["loss"])


def arrays(model: Any) -> list[Any]:
    leaves = jax.tree.leaves(nnx.state(model) if isinstance(model, nnx.Module) else model)
    leaves = jax.tree.leaves(model.variables) if isinstance(model, nn.Module) else leaves
    return [leaf for leaf in leaves if hasattr(leaf, "shape")]


@pytest.mark.parametrize("kind", MODELS)
def test_the_model_of_a_state_needs_no_init(kind: str) -> None:
    loss, model = MODELS[kind]
    dp = make(loss)
    state = trained(dp, model())
    found = make(loss, layout="fsdp").model(state)
    assert type(found) is type(model())
    near(arrays(found), arrays(dp.model(state)))
    values = make(loss).predict(state, ROWS, loss)
    assert values.mean() == pytest.approx(make(loss).evaluate(state, ROWS)["loss"], rel=1e-5)


def test_a_run_begins_with_a_state_of_another_and_is_loaded_into_a_third(tmp_path: Path) -> None:
    loss, model = MODELS["nnx"]
    settings: dict[str, Any] = {"batch_size": 8, "steps": 2, "run_dir": tmp_path, "progress": False}
    state, _ = make(loss).steps(make(loss).init(model()), [ROWS, ROWS])
    result = rx.fit(make(loss, layout="fsdp"), state, ROWS, **settings)
    run = rx.load(tmp_path, dp=make(loss, layout="zero1"), state=result.state)
    assert (int(run.state.step), type(run.model)) == (4, Net)
    known = make(loss)
    known.place(result.state)
    near(rx.load(tmp_path, dp=known).state.params, result.state.params)
    spikes = rx.fit(
        known,
        known.init(model()),
        ROWS,
        **settings | {"run_dir": None},
        guard=rx.Guard(skip_spikes=True),
    )
    assert make(loss).evaluate(spikes.state, ROWS)["rows"] == 16


OTHERS = {
    "optimizer": {"optimizer": optax.sgd(0.1, momentum=0.9)},
    "precision": {"precision": "float16"},
    "reduction": {"mode": "shard_map", "reduction": "int8"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_that_cannot_be_used_says_what_differs(what: str) -> None:
    state = trained(make())
    for call in (
        lambda dp: dp.step(state, ROWS),
        lambda dp: dp.evaluate(state, ROWS),
        lambda dp: rx.fit(dp, state, ROWS, batch_size=8, steps=1, progress=False),
    ):
        with pytest.raises(rx.errors.StateError, match=rf"the {what} differs") as caught:
            call(make(**OTHERS[what]))
        assert "\n" not in str(caught.value)
    dp = make()
    dp.init({"w": jnp.ones(4)})
    with pytest.raises(rx.errors.StateError, match=r"\.params\['w'\].*\bmodel\b"):
        dp.step(state, ROWS)
    assert int(make().step(state, ROWS)[0].step) == 2


class Scaled(nnx.Module):
    def __init__(self, scale: float) -> None:
        self.w, self.scale = nnx.Param(jnp.ones(4)), scale


def scaled(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model.w.get_value() * model.scale - batch["y"]) ** 2


def test_the_structure_of_a_state_does_not_tell_its_model() -> None:
    states = [make(scaled).init(Scaled(scale)) for scale in (1.0, 2.0)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert [make(scaled).model(state).scale for state in states] == [1.0, 2.0]
    traces = []
    same = jax.jit(lambda state: traces.append(0) or state)
    for state in (states[0], copy.deepcopy(states[0]), dataclasses.replace(states[0], losses=())):
        assert make(scaled).model(same(state)).scale == 1.0
    assert len(traces) == 1


def test_a_state_that_was_pickled_or_saved_by_orbax_is_one_of_the_known_model(
    tmp_path: Path,
) -> None:
    dp = make()
    state = trained(dp)
    again = pickle.loads(pickle.dumps(state))
    near(again.params, state.params)
    assert dp.evaluate(again, ROWS) == dp.evaluate(state, ROWS)
    with pytest.raises(rx.errors.StateError, match=r"dp\.abstract_state\(model\)"):
        make().step(again, ROWS)
    with pytest.raises(rx.errors.StateError, match=r"dp\.abstract_state\(model\)"):
        make().abstract_state()
    other = make(layout="fsdp")
    other.place(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", other.abstract_state())
    near(make().model(restored), dp.model(state))


def test_rows_of_a_state_are_those_of_another_number_of_devices() -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        seen = state["seen"].value + batch["x"][:, 0]
        return {"seen": rx.ByRow(seen)}, {"loss": rx.mean(seen)}

    rows = {"x": ROWS["x"][:12]}
    dp, six = (parallel(step=step, devices=devices) for devices in (4, 6))
    state, _ = dp.step(dp.init({"seen": rx.ByRow(jnp.zeros(12))}), rows)
    np.testing.assert_allclose(six.model(state)["seen"].value, rows["x"][:, 0], rtol=1e-6)
    state, metrics = six.step(state, rows)
    assert float(metrics["loss"]) == pytest.approx(2 * rows["x"][:, 0].mean(), rel=1e-5)
    with pytest.raises(rx.errors.StateError, match="16"):  # of 8 devices, with 4 rows of padding
        rx.DataParallel(step=step).step(state, rows)
