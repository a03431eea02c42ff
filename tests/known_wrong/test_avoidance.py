"""Options that avoid wrong numbers reach every program; where plain JAX is wrong, ours is right."""

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import parallel

import replicax as rx
from replicax.core.ground.quick_compile import quick_options
from replicax.known_wrong.known_table import known_table
from replicax.plan.compilation import Compilation, answer
from replicax.plan.exported import export_step
from replicax.verify.trial import compiled_reference

ROWS = 40_000
NO_SUCH = {"xla_no_such_option": True}


def squares(rows: Any) -> Any:
    return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(rows)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return squares(batch) * model


def step(state: Any, batch: Any, key: Any) -> Any:
    means, _ = rx.value_and_grad(loss)(state, batch, key)
    return state, means


def built(how: str) -> rx.DataParallel:
    """Return a step on a device; in mode `exact` on as many as it needs."""
    if how == "custom":
        return parallel(step=step, devices=1)
    if how == "exact":
        return parallel(loss, optax.sgd(0.0), mode=how, devices=8, micro_shards=8)
    return parallel(loss, optax.sgd(0.0), mode=how, devices=1)


def wrong_here() -> bool:
    """Whether the jaxlib here computes this sum of products wrongly in plain JAX."""
    [row] = [row for row in known_table() if row.name == "product-then-sum"]
    return row.holds(importlib.metadata.version("jaxlib"))


only_where_wrong = pytest.mark.skipif(
    not wrong_here(), reason="this jaxlib computes the sum of a vmapped product rightly"
)


def numbers(devices: int) -> np.ndarray:
    """Return `[rows, 3]`, of which a device has so many that some are wrong."""
    first = np.tile(np.arange(ROWS, dtype=np.float32), devices)
    return np.stack((first, 0 * first, 0 * first), axis=1)


@only_where_wrong
def test_plain_jax_is_wrong() -> None:
    rows = numbers(1)
    assert np.sum(np.asarray(jax.jit(squares)(rows)) != rows[:, 0] ** 2) > 1_000


@only_where_wrong
@pytest.mark.parametrize("how", ["single", "jit", "shard_map", "pmap", "exact", "custom"])
def test_the_same_sum_is_right(how: str) -> None:
    dp = built(how)
    rows = numbers(dp.mesh.size)
    wanted = np.mean(rows[:, 0].astype(np.float64) ** 2)
    state = dp.init(jnp.float32(1))
    (batch,) = dp.feed(rows, len(rows))
    _, metrics = dp.step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(wanted, rel=1e-6)
    if how != "custom":
        state = dp.init(jnp.float32(1))
        assert dp.evaluate(state, [rows])["loss"] == pytest.approx(wanted, rel=1e-6)
        assert np.array_equal(dp.predict(state, [rows], loss), rows[:, 0] ** 2)


@pytest.mark.parametrize("how", ["single", "jit", "shard_map", "pmap", "exact", "custom"])
def test_the_options_reach_every_program(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.ones((16, 3), np.float32)
    state, batch = built(how).init(jnp.float32(1)), next(iter(built(how).feed(rows, 16)))
    monkeypatch.setattr("replicax.core.placement.mesh.avoiding", lambda platform: NO_SUCH)
    programs: list[Callable[[rx.DataParallel], Any]] = [
        lambda dp: dp.init(jnp.float32(1)),
        lambda dp: dp.step(state, batch),
    ]
    if how != "custom":
        programs.append(lambda dp: dp.evaluate(state, [batch]))
        programs.append(lambda dp: dp.predict(state, [batch], loss))
    for run in programs:
        with pytest.raises(Exception, match="xla_no_such_option"):
            run(built(how))


@pytest.mark.parametrize("name", ["config", "modes.exact.combining_programs"])
def test_they_reach_each_kind_of_exact_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dp = built("exact")
    state, batch = dp.init(jnp.float32(1)), next(iter(dp.feed(np.ones((16, 3), np.float32), 16)))
    monkeypatch.setattr(f"replicax.core.{name}.options_on", lambda mesh: NO_SUCH)
    with pytest.raises(Exception, match="xla_no_such_option"):
        built("exact").step(state, batch)


def test_they_reach_the_reference_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    here = inspect.unwrap(compiled_reference).__globals__
    monkeypatch.setitem(here, "avoiding", lambda platform: NO_SUCH)
    with pytest.raises(Exception, match="xla_no_such_option"):
        compiled_reference(lambda state, batch: state, jnp.ones(2), jnp.ones((4, 2)), None)


def test_they_reach_programs_that_run_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are programs of the first step's checks, and of verify."""
    monkeypatch.setattr("replicax.core.ground.quick_compile.avoiding", lambda platform: NO_SUCH)
    assert quick_options("cpu").items() >= NO_SUCH.items()


def test_they_reach_the_compiler_of_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = built("jit")
    shapes = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((8, 3), jnp.float32)
    program = export_step(dp, *shapes, "cpu", None)
    assert isinstance(answer(program, jax.devices(), tunes=True), Compilation)
    monkeypatch.setitem(answer.__globals__, "options_on", lambda mesh: NO_SUCH)
    assert "xla_no_such_option" in str(answer(program, jax.devices(), tunes=True))


def test_options_of_ones_own_come_after(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "xla_backend_optimization_level"
    avoided = {name: "1", "xla_cpu_parallel_codegen_split_count": "1"}
    monkeypatch.setattr("replicax.core.placement.mesh.avoiding", lambda platform: avoided)
    own = {name: "0"}
    dp = parallel(loss, optax.sgd(0.0), compiler_options=own)
    assert dp.configuration.options(dp.mesh) == avoided | own
    assert dp.configuration.names()["compiler_options"] == own
