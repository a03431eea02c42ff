"""A small step to plan."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.plan.planned import Plan
from replicax.plan.target import Target, parse_target

WIDTH = 256
PARAMETERS = 32 * WIDTH + WIDTH * WIDTH + WIDTH
MODEL = {
    "first": jax.ShapeDtypeStruct((32, WIDTH), np.float32),
    "second": jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32),
    "bias": jax.ShapeDtypeStruct((WIDTH,), np.float32),
}
ROOM = 3_000_000
"""Bytes of a device: the state takes 0.9 MB, and some hundred rows the rest."""


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    hidden = jnp.sin(jnp.sin(jnp.tanh(batch["x"] @ model["first"])))
    return jnp.mean(jnp.sin(jnp.tanh(hidden @ model["second"] + model["bias"])), axis=-1)


def step(**settings: Any) -> rx.DataParallel:
    mesh = rx.make_mesh(1, devices=jax.devices())
    return rx.DataParallel(loss, optax.adam(1e-3), **{"mesh": mesh, **settings})


def rows(count: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"x": jax.ShapeDtypeStruct((count, 32), np.float32)}


def host(devices: int, usable_bytes: int | None = ROOM) -> Target:
    target = parse_target(f"cpu:{devices}")
    return dataclasses.replace(
        target, chip=dataclasses.replace(target.chip, usable_bytes=usable_bytes)
    )


def strict(found: Plan) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(found.to_json(), allow_nan=False))
    return plain
