"""Programs compiled once for all devices, and the pieces of a step in mode `exact`."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only
from support.training import assert_near, epochs, parallel, train

import replicax as rx
from replicax.core.modes.exact.replica_program import (
    ReplicaProgram,
    as_global,
    with_deterministic_attention,
)
from replicax.core.placement.mesh import sharding_of
from replicax.errors import ConfigError, LossError
from replicax.train.files.fingerprint import sha256

ROWS, WIDTH = 64, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
DATA = {"x": X, "y": np.tanh(X @ RNG.normal(size=WIDTH)).astype(np.float32)}
MODEL = {
    "in": RNG.normal(size=(WIDTH, 8)).astype(np.float32) / 4,
    "out": RNG.normal(size=8).astype(np.float32) / 3,
}
OPTIMIZER = optax.adamw(1e-2)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return rx.make_mesh(devices=jax.devices()[:devices])


def loss(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["in"])
    if key is not None:
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    return (hidden @ model["out"] - batch["y"]) ** 2


# One program.


def products(devices: int, scale: float = 1.0) -> tuple[str, list[np.ndarray]]:
    """Return the digest of a program and its result on each device."""
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((WIDTH, 8), (8, WIDTH))]
    closed = jax.make_jaxpr(lambda w, x: [jnp.tanh(x @ w * scale), jnp.sum(x)])(*shapes)
    mesh = mesh_of(devices)
    program = ReplicaProgram("products", closed.jaxpr, mesh, [None, 0], [0, 0], {})
    weights = jax.device_put(MODEL["in"], sharding_of(mesh, None))
    rows = jax.device_put(X[: 8 * devices], sharding_of(mesh, 0))
    return program.digest, [np.asarray(as_global(each)) for each in program(weights, rows)]


def test_each_device_runs_it_on_its_own_rows() -> None:
    digest, (values, sums) = products(4)
    assert values.shape == (32, 8)
    assert sums.shape == (4,)
    np.testing.assert_allclose(sums, X[:32].reshape(4, -1).sum(1), rtol=1e-5)
    alone, (first, _) = products(1)
    assert digest == alone
    assert first.tobytes() == values[:8].tobytes()


def test_another_program_has_another_digest() -> None:
    assert products(1)[0] != products(1, scale=2.0)[0]


def test_every_backward_pass_of_attention_is_deterministic() -> None:
    """XLA would mark only the first of equal calls, and not find the kernel of the second."""
    targets = ["Softmax", "SoftmaxBackward", "SoftmaxBackward", "ScaleBiasSoftmaxBackward"]
    config = json.dumps({"cudnn_fmha_backend_config": {"fmha_scale": 0.125}})

    def attention(x: jax.Array) -> jax.Array:
        for target in targets:
            call = f"__cudnn$fmha{target}"
            x = jax.ffi.ffi_call(call, x, custom_call_api_version=2, legacy_backend_config=config)(
                x
            )
        return x

    module = with_deterministic_attention(jax.jit(attention).lower(X).compiler_ir())
    calls = [line for line in str(module).splitlines() if "custom_call" in line]
    found = ["force_deterministic\\22: true" in line for line in calls]
    assert found == [False, True, True, True]


def test_a_kernel_without_a_deterministic_form_is_refused() -> None:
    flash3 = jax.jit(lambda x: jax.ffi.ffi_call("dew_flash3_mha_bwd", x)(x))
    with pytest.raises(ConfigError, match=r"'exact' .*dew_flash3_mha_bwd"):
        with_deterministic_attention(flash3.lower(X).compiler_ir())


# The pieces of a step.


def one(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
    updates, moments = OPTIMIZER.update(gradient, state["moments"], state["model"])
    return {"model": optax.apply_updates(state["model"], updates), "moments": moments}, means


def scan(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    def turn(state: Any, key: Any) -> tuple[Any, Any]:
        state, means = one(state, batch, key)
        return state, means["loss"]

    state, losses = jax.lax.scan(turn, state, jax.random.split(key, 3), reverse=True)
    return state, {"loss": losses[0], "last": losses[-1]}


def turns(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    def turn(carry: Any) -> Any:
        count, state, _ = carry
        state, means = one(state, batch, jax.random.fold_in(key, count))
        return count + 1, state, means["loss"]

    begin = (0, state, jnp.float32(1))
    _, state, value = jax.lax.while_loop(lambda c: (c[0] < 3) & (c[2] > 0), turn, begin)
    return state, {"loss": value}


def branch(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    value = rx.mean(batch["x"] @ state["model"]["in"][:, 0])
    twice = lambda state: one(one(state, batch, key)[0], batch, None)  # noqa: E731
    return jax.lax.cond(value > 0, lambda state: one(state, batch, key), twice, state)


def rows_in_the_body(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    noise = jax.random.normal(key, batch["x"].shape)
    target = jnp.tanh(batch["x"] @ state["model"]["in"]).mean(1)
    state, means = one(state, {"x": batch["x"] + noise / 9, "y": batch["y"] + target}, key)
    centred = batch["x"] - rx.gather(batch["x"]).mean(0)
    return state, {**means, "variance": rx.mean((centred**2).mean(1))}


def called(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    return jax.checkpoint(jax.jit(one))(state, batch, key)


def several(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    scales = jnp.arange(3.0)
    means = jax.vmap(lambda scale: rx.mean(scale * batch["y"]))(scales)
    state, metrics = one(state, batch, key)
    return state, {**metrics, "scaled": means[2]}


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step for step in (one, scan, turns, branch, rows_in_the_body, called, several)
}


def trained(step: Callable[..., Any], devices: int, mode: str = "exact") -> tuple[Any, Any]:
    dp = rx.DataParallel(step=step, mesh=mesh_of(devices), mode=mode)
    begun = {"model": MODEL, "moments": OPTIMIZER.init(MODEL)}
    state, told = train(dp, begun, epochs(dp, DATA, 32, 2, shuffle=True))
    return state, told[-1]


@functools.cache
def digest(name: str, devices: int) -> str:
    return sha256(trained(STEPS[name], devices))


@pytest.mark.promise("exact.custom-steps")
@pytest.mark.parametrize("devices", only([8], [2, 8]))
@pytest.mark.parametrize("name", only(["branch"], STEPS))
def test_a_custom_step_has_the_same_bits(name: str, devices: int) -> None:
    assert digest(name, devices) == digest(name, 1)


@pytest.mark.parametrize("name", only(["scan"], ["scan", "turns", "branch"]))
def test_and_the_numbers_of_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.random, "bernoulli", lambda key, p, shape: jnp.full(shape, p > 0))
    wanted, _ = trained(STEPS[name], 1, mode="single")
    found, _ = trained(STEPS[name], 4)
    assert_near(found.params, wanted.params, rtol=2e-3, atol=1e-5)


def test_what_is_returned_twice_is_not_deleted_by_the_next_step() -> None:
    def twice(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        state, means = one(state, batch, key)
        return {**state, "target": state["model"]}, {**means, "last": state["model"]["out"][0]}

    dp = rx.DataParallel(step=twice, mesh=mesh_of(2), mode="exact")
    begun = {"model": MODEL, "moments": OPTIMIZER.init(MODEL), "target": MODEL}
    state, _ = train(dp, begun, dp.feed(DATA, 16))
    target, model = state.params["target"], state.params["model"]
    jax.tree.map(np.testing.assert_array_equal, target, model)


def test_the_metrics_of_a_scaled_step_outlive_the_next() -> None:
    dp = rx.DataParallel(loss, OPTIMIZER, mesh=mesh_of(2), mode="exact", precision="float16")
    state, first = dp.step(dp.init(MODEL), DATA)
    dp.step(state, DATA)
    assert {name: float(value) for name, value in first.items()}["loss_scale"] == 2.0**15


def test_a_step_that_keeps_rows_is_refused() -> None:
    def keeps(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        state, means = one(state, batch, key)
        return {**state, "model": {**state["model"], "out": batch["x"].sum(0)[:8]}}, means

    with pytest.raises(LossError, match=r"rows .*rx\.gather"):
        trained(keeps, 1)


def programs(optimizer: Any, devices: int = 2, **settings: Any) -> list[ReplicaProgram]:
    dp = rx.DataParallel(loss, optimizer, mesh=mesh_of(devices), mode="exact", **settings)
    state = dp.init(MODEL)
    return list(dp.program(state).step.compiled(state, next(iter(dp.feed(DATA, 32)))))


@pytest.mark.promise("exact.one-program-for-all")
@pytest.mark.parametrize(
    ("optimizer", "settings", "count"),
    [
        (optax.adam(1e-2), {}, 2),  # the sums of a micro-shard, the update
        (optax.adam(optax.cosine_decay_schedule(1e-2, 9)), {"precision": "bfloat16"}, 2),
        # The sums, the divisor, the update of a piece, the metrics; and what a norm adds.
        (optax.adam(1e-2), {"layout": "zero1"}, 4),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), {"layout": "zero1"}, 5),
    ],
)
def test_how_many_programs_a_step_is(optimizer: Any, settings: Any, count: int) -> None:
    found = programs(optimizer, **settings)
    assert [program.name for program in found] == [f"step.{n}" for n in range(count)]
    again = programs(optimizer, 8, **settings)
    assert [program.digest for program in found] == [program.digest for program in again]


# A sharded optimizer state.

OPTIMIZERS = {
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
    "several": optax.MultiSteps(optax.adam(1e-2), 2),
    "skipping": optax.apply_if_finite(optax.sgd(1e-2, momentum=0.9), 3),
}


@functools.cache
def in_pieces(name: str, devices: int) -> str:
    """Return the digest of a sharded state after four steps."""
    dp = parallel(loss, OPTIMIZERS[name], devices=devices, mode="exact", layout="zero1")
    state, _ = train(dp, MODEL, dp.feed(DATA, 16))
    held = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (WIDTH, 8)]
    assert {leaf.addressable_data(0).size for leaf in held} == {WIDTH * 8 // devices}
    return sha256(state)


@pytest.mark.promise("exact.zero1")
@pytest.mark.parametrize("devices", only([8], [2, 8]))
@pytest.mark.parametrize("name", only(["clipped"], OPTIMIZERS))
def test_pieces_have_the_same_bits_and_a_part_of_the_memory(name: str, devices: int) -> None:
    assert in_pieces(name, devices) == in_pieces(name, 1)
