"""The number of micro-batches that makes a batch fit, without padding if possible."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.plan import steps
from replicax.plan.largest import at_once_and_fitting
from replicax.plan.steps import in_fit
from replicax.plan.target import Target, parse_target

MODEL = {"in": jnp.zeros((8, 4096)), "out": jnp.zeros(4096)}
BATCH = {"x": jax.ShapeDtypeStruct((1, 8), np.float32)}


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    return jnp.tanh(jnp.sin(batch["x"] @ model["in"])) @ model["out"]


def host(room: int | None) -> Target:
    target = parse_target("cpu:1")
    chip = dataclasses.replace(target.chip, usable_bytes=room)
    return dataclasses.replace(target, chip=chip)


def found(rows: int, room: int | None) -> Any:
    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=rx.make_mesh(1, devices=jax.devices()[:1]))
    target = host(room)
    return at_once_and_fitting(in_fit(dp, MODEL, target), MODEL, BATCH, rows, target)


def at_once(rows: int) -> int:
    return found(rows, None)[0].bytes


@pytest.mark.parametrize(
    ("rows", "parts", "count"),
    [(512, 1, None), (512, 3, 4), (512, 5, 8), (510, 3, 3), (509, 3, 3)],
    ids=["at once", "a divisor", "another one", "exactly", "padded"],
)
def test_the_fewest_that_fit(rows: int, parts: int, count: int | None) -> None:
    room = at_once(-(-rows // parts)) + 2 * 4 * 4096 * 9  # and the sums over micro-batches
    need, fitting = found(rows, room)
    assert need.rows == rows
    assert need.fits == (count is None)
    if count is None:
        assert fitting is None
        return
    assert fitting.accumulate == count
    assert fitting.need.rows == -(-rows // count) * count
    assert fitting.need.bytes <= room < need.bytes


def test_where_nothing_fits_or_nobody_tells() -> None:
    need, fitting = found(512, 100_000)  # the parameters alone take more
    assert (need.fits, fitting) == (False, None)
    need, fitting = found(512, None)
    assert (need.fits, fitting) == (True, None)


def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "export_step", lambda *_: pytest.fail("exported for a compiler"))
    assert found(512, at_once(200))[1].accumulate == 4
