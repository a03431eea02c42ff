"""Unusual hand-written steps: mistakes that were once missed or named otherwise, and right ones."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from verify.step_parts import (
    AXIS,
    KEY,
    ROWS,
    Broken,
    Entry,
    batch,
    descend,
    dropout_step,
    errors,
    mesh,
    only_params,
    optax_state,
    own_key,
    pmapped,
    pmean,
    psum,
    reduced_by,
    reference,
    same,
    sharded,
    with_optax,
)

# The key lives in the state.


def with_rng(raw: bool) -> Callable[[], Any]:
    def state() -> Any:
        key = jax.random.key(5)
        return {**only_params(), "rng": np.asarray(jax.random.key_data(key)) if raw else key}

    return state


def drawn_from_state(fold: Any, reduce: Any) -> Any:
    def update(state: Any, rows: Any) -> Any:
        later, key = jax.random.split(state["rng"])
        after, metrics = dropout_step(fold, reduce)(state, rows, key)
        return {**after, "rng": later}, metrics

    return update


# Weights that are made inside the step.


def lengths() -> Any:
    """Rows of 5 places, of which later rows fill fewer; -1 is none."""
    places = np.arange(5) < np.linspace(5, 1, ROWS).astype(int)[:, None]
    labels = np.random.default_rng(3).integers(0, 4, (ROWS, 5))
    return {**batch(), "labels": np.where(places, labels, -1).astype(np.int32)}


def counted_inside(reduce: Any) -> Any:
    def loss_of(params: Any, rows: Any) -> jax.Array:
        real = (rows["labels"] >= 0).astype(jnp.float32)
        return jnp.sum(errors(params, rows)[:, None] * real) / jnp.sum(real)

    def update(state: Any, rows: Any) -> Any:
        loss, gradient = reduce(jax.value_and_grad(loss_of)(state["params"], rows))
        return {"params": descend(state["params"], gradient)}, {"loss": loss}

    return update


# A warm-up, whose first rate is 0.

warm_up = optax.adam(optax.linear_schedule(0.0, 1e-2, 4))


# What shows only later, or only where a norm is below its limit.


def doubled_later(update: Any, since: int) -> Any:
    """From a step on, twice what `update` does."""

    def step(state: Any, rows: Any) -> Any:
        before = state["params"]
        after, metrics = update({"params": before}, rows)
        times = jnp.where(state["steps"] < since, 1.0, 2.0)
        params = jax.tree.map(lambda old, new: old + times * (new - old), before, after["params"])
        return {"params": params, "steps": state["steps"] + 1}, metrics

    return step


def counted_state() -> Any:
    return {**only_params(), "steps": np.int32(0)}


loosely_clipped = optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(0.1))


# Python around the step.


def reads_what_it_donated() -> Any:
    compiled = sharded(reduced_by(pmean))()

    def step(state: Any, rows: Any) -> Any:
        after, metrics = compiled(state, rows)
        old, new = (np.asarray(each["params"]["out"]["bias"]) for each in (state, after))
        return after, {**metrics, "moved": np.abs(new - old).max()}

    return step


def moved_reference(state: Any, rows: Any) -> Any:
    after, metrics = reference(state, rows)
    moved = after["params"]["out"]["bias"] - state["params"]["out"]["bias"]
    return after, {**metrics, "moved": jnp.abs(moved).max()}


def cut_to_sixteen(state: Any, rows: Any) -> Any:
    count = rows["x"].shape[0] // 16 * 16
    kept = jax.tree.map(lambda leaf: leaf[:count], rows)
    kept = lax.with_sharding_constraint(kept, NamedSharding(mesh(), P(AXIS)))
    after, metrics = reference(state, kept)
    return lax.with_sharding_constraint(after, NamedSharding(mesh(), P())), metrics


def pair() -> Any:
    rows = batch()
    return rows["x"], rows["y"]


def of_pair(update: Any) -> Any:
    def taking_a_pair(state: Any, rows: Any) -> Any:
        x, y = rows
        return update(state, {"x": x, "y": y})

    return taking_a_pair


def _entry(kind: Any, step: Any, **more: Any) -> Any:
    return kind(step, **{"reference": reference, "state": only_params, "batch": batch, **more})


def _drawn(raw: bool) -> dict[str, Any]:
    return {"reference": drawn_from_state(same, same), "state": with_rng(raw)}


WARM_UP = {"reference": with_optax(warm_up), "state": optax_state(warm_up)}
SAME_NUMBERS = ("random numbers",)

BROKEN = {
    "key_in_state_shared": _entry(
        Broken, sharded(drawn_from_state(same, pmean)), words=SAME_NUMBERS, **_drawn(False)
    ),
    "raw_key_in_state_shared": _entry(
        Broken, pmapped(drawn_from_state(same, pmean)), words=SAME_NUMBERS, **_drawn(True)
    ),
    "counted_inside": _entry(
        Broken,
        sharded(counted_inside(pmean)),
        reference=counted_inside(same),
        batch=lengths,
        words=("mean of means",),
    ),
    "reads_what_it_donated": _entry(
        Broken,
        reads_what_it_donated,
        reference=moved_reference,
        words=("donate_argnums",),
        case="2 steps",
    ),
    "remainder_of_sixteen": _entry(
        Broken, lambda: jax.jit(cut_to_sixteen), words=("were dropped",), case="indivisible batch"
    ),
    "wrong_later": _entry(
        Broken,
        sharded(doubled_later(reduced_by(pmean), 2)),
        reference=doubled_later(reference, 9),
        state=counted_state,
        words=(),
        case="4 steps",
        options={"steps": 4},
    ),
    "sum_clipped_loosely": _entry(
        Broken,
        sharded(with_optax(loosely_clipped, psum, same, pmean)),
        reference=with_optax(loosely_clipped),
        state=optax_state(loosely_clipped),
        words=("exactly 8 times",),
    ),
    "warm_up_psum": _entry(
        Broken,
        pmapped(with_optax(warm_up, psum, same, pmean)),
        words=("exactly 8 times",),
        **WARM_UP,
    ),
}
CORRECT = {
    "key_in_state": _entry(Entry, sharded(drawn_from_state(own_key, pmean)), **_drawn(False)),
    "raw_key_in_state": _entry(Entry, pmapped(drawn_from_state(own_key, pmean)), **_drawn(True)),
    "keys_split_outside": _entry(
        Entry,
        pmapped(dropout_step(same, pmean)),
        reference=dropout_step(same, same),
        options=KEY,
    ),
    "warm_up": _entry(Entry, pmapped(with_optax(warm_up, pmean, same, pmean)), **WARM_UP),
    "tuple_taken_whole": _entry(
        Entry, sharded(of_pair(reduced_by(pmean))), reference=of_pair(reference), batch=pair
    ),
}
