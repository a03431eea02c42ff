"""`DataParallel`: placement, reuse, and errors of wrong use."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import BATCH, CASES
from support.tiers import only
from support.training import assert_near

import replicax as rx
from replicax.verify.step_checks import counted_compilations

MODEL = {"w": jnp.float32(2.0), "b": jnp.zeros(3)}
SOURCE = {"x": np.arange(24, dtype=np.float32).reshape(8, 3)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((model["w"] * batch["x"] - model["b"]) ** 2, axis=1)


def make(**options: Any) -> rx.DataParallel:
    return rx.DataParallel(loss, optax.adam(0.1), **options)


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "pmap"])
def test_a_second_step_and_a_padded_batch_compile_nothing(mode: str) -> None:
    dp = make(mode=mode)
    state = dp.init(MODEL)
    rows = {"x": np.ones((20, 3), np.float32)}
    seen = 0
    for batch in dp.feed(rows, 8):
        state, _ = dp.step(state, batch)
        seen += 1
    assert seen == 3
    assert dp.program(state).step.cache_size() == 1


def test_a_batch_without_weight_has_gradient_0() -> None:
    def weightless(model: Any, batch: Any, key: Any) -> Any:
        return rx.Weighted(loss(model, batch, key), batch["weight"])

    optimizer = optax.adamw(0.1)
    dp = rx.DataParallel(weightless, optimizer, donate=False)
    state = dp.init(MODEL)
    state, _ = dp.step(state, {**SOURCE, "weight": np.ones(8, np.float32)})
    after, metrics = dp.step(state, {**SOURCE, "weight": np.zeros(8, np.float32)})
    assert np.isnan(metrics["loss"])
    assert int(after.step) == 2
    nothing = jax.tree.map(jnp.zeros_like, state.params)
    updates, opt_state = optimizer.update(nothing, state.opt_state, state.params)
    expected = optax.apply_updates(state.params, updates), opt_state
    assert_near((after.params, after.opt_state), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("before", "after"), only([(4, 1)], [(1, 4), (4, 1), (2, 8)]))
def test_a_model_goes_on_on_other_devices(before: int, after: int) -> None:
    first, second = (make(mesh=rx.make_mesh(count)) for count in (before, after))
    state, _ = first.step(first.init(MODEL), SOURCE)
    model = first.model(state)
    moved = second.init(model)
    np.testing.assert_array_equal(moved.params["w"], model["w"])
    second.step(moved, SOURCE)
    assert not model["w"].is_deleted()


@pytest.mark.parametrize("mode", only(["jit"], ["jit", "shard_map", "pmap"]))
def test_a_loop_that_reads_nothing_does_not_run_too_far_ahead(mode: str) -> None:
    """More steps of some milliseconds than XLA's CPU backend queues without a hang."""

    def slow(model: Any, batch: Any, key: Any) -> Any:
        x = batch["x"]
        for _ in range(4):
            x = jnp.tanh(x @ model["w"])
        return x.sum(1)

    dp = rx.DataParallel(slow, optax.sgd(0.01), mode=mode)
    state = dp.init({"w": jnp.full((256, 256), 0.01)})
    batch = next(iter(dp.feed({"x": np.ones((1024, 256), np.float32)}, 1024)))
    for _ in range(80):
        state, metrics = dp.step(state, batch)
    assert np.isfinite(metrics["loss"])


def test_bfloat16_computes_low_and_keeps_float32() -> None:
    seen = []

    def watching(model: Any, batch: Any, key: Any) -> Any:
        seen.append((model["w"].dtype, batch["x"].dtype))
        return loss(model, batch, key)

    dp = rx.DataParallel(watching, optax.adam(0.1), precision="bfloat16")
    state, metrics = dp.step(dp.init(MODEL), SOURCE)
    assert set(seen) == {(np.dtype(jnp.bfloat16),) * 2}
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {np.dtype(np.float32)}
    assert metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize("mode", only(["shard_map"], ["jit", "shard_map", "pmap"]))
@pytest.mark.parametrize("kind", ["pytree", "nnx"])
def test_bfloat16_is_near_float32(mode: str, kind: str) -> None:
    case = CASES[kind]
    found = {}
    for precision in ("float32", "bfloat16"):
        dp = rx.DataParallel(case.loss, optax.sgd(0.1), mode=mode, precision=precision)
        (batch,) = dp.feed(case.source, BATCH)
        _, metrics = dp.step(dp.init(case.model()), batch)
        found[precision] = float(metrics["loss"])
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)
    assert found["bfloat16"] != found["float32"]


def test_lower_takes_shapes_and_another_mesh() -> None:
    dp, elsewhere = make(mode="shard_map"), make(mesh=rx.make_mesh(2))
    shapes = {"x": jax.ShapeDtypeStruct((16, 3), jnp.float32)}
    (batch,) = elsewhere.feed(SOURCE, 8)
    for model, rows in ((jax.eval_shape(lambda: MODEL), shapes), (elsewhere.init(MODEL), batch)):
        text = dp.lower(model, rows, mesh=rx.make_mesh(4)).as_text()
        assert "num_partitions = 4" in text or 'data"=4' in text or "'data'=4" in text


def test_what_is_lowered_has_the_rows_that_step_computes() -> None:
    dp = make(mesh=rx.make_mesh(2), mode="exact", micro_shards=8)
    ten = {"x": np.ones((10, 3), np.float32)}
    (batch,) = dp.feed(ten, 10)
    assert batch.size == 16  # 2 rows in each micro-shard
    for described in (dp.lower(MODEL, ten), dp.trace(MODEL, ten)):
        (_, rows), _ = described.args_info
        assert jax.tree.map(jnp.shape, rows) == jax.tree.map(jnp.shape, batch)
    assert dp.program(MODEL).batches.described(ten).size == 16
    state, _ = dp.step(dp.init(MODEL), ten)
    with counted_compilations() as seen:
        dp.step(state, batch)
    assert not seen


@pytest.mark.parametrize("mode", ["single", "jit", "shard_map", "pmap"])
def test_step_runs_what_lower_compiled_and_the_state_may_be_of_another_mode(mode: str) -> None:
    mesh = rx.make_mesh(1 if mode == "single" else 4)
    state = make(mesh=mesh).init(MODEL)
    dp = make(mesh=mesh, mode=mode)
    described = dp.abstract_state(MODEL)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), described) == (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state)
    )
    (batch,) = dp.feed(SOURCE, 8)
    jax.block_until_ready(jax.random.key(0))  # compiles small programs too
    compiled: list[str] = []

    def listener(event: str, _seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        dp.lower(state, batch).compile()
        assert len(compiled) == 1
        state, metrics = dp.step(state, batch)
        jax.block_until_ready(metrics)
        dp.step(state, batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled[1:] == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "jti"}, "did you mean 'jit'"),
        ({"layout": "zero"}, "did you mean 'zero1'"),
        ({"mode": "pmap", "layout": "fsdp"}, "use mode='jit'"),
        ({"mode": "exact", "layout": "fsdp"}, "use mode='jit'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"precision": "float8"}, "float32, bfloat16, float16"),
        ({"mesh": jax.sharding.Mesh(jax.devices(), ("batch",))}, "none named 'data'"),
        ({"mode": "single", "mesh": jax.sharding.Mesh(jax.devices(), ("data",))}, "most 1:"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: Any, says: str) -> None:
    for build in (make, make().replace):
        with pytest.raises(rx.errors.ConfigError) as caught:
            build(**options)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(rx.errors.ConfigError, match=rf"seed={seed}; .*(least 0|most)"):
        make().init(MODEL, seed=seed)


def test_evaluation_takes_the_micro_batches_of_the_step() -> None:
    def wide(model: Any, batch: Any, key: Any) -> jax.Array:
        return jnp.tanh(jnp.sin(batch["x"][:, None] * jnp.ones(4096)) @ model["w"])

    def together(model: Any, batch: Any, key: Any) -> jax.Array:
        return batch["x"] - jnp.mean(rx.gather(batch["x"]))

    x, losses, memory = np.linspace(0, 1, 512, dtype=np.float32), [], []
    for accumulate in (1, 4):
        dp = rx.DataParallel(wide, optax.sgd(0.1), accumulate=accumulate)
        state = dp.init({"w": jnp.ones(4096)})
        losses.append(dp.evaluate(state, dp.feed({"x": x}, 256))["loss"])
        (batch, *_) = dp.feed({"x": x}, 256)
        program = dp.program(state.params).score.lower(state, batch).compile()
        memory.append(program.memory_analysis().temp_size_in_bytes)
        other = dp.evaluate(state, dp.feed({"x": x}, 512), loss=together)
        assert other["loss"] == pytest.approx(0, abs=1e-6)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert memory[1] < memory[0] / 2
