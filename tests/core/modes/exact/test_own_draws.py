"""Random numbers of rows in the body of a custom step: others in each micro-shard."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import EXHAUSTIVE
from support.training import parallel

import replicax as rx
from replicax.core.step.update import step_key

pytestmark = EXHAUSTIVE  # one step of all draws, which takes seconds
ROWS, MICRO_SHARDS = 16, 8
DATA = {"x": np.arange(ROWS, dtype=np.float32)}


def in_loops(key: Any, rows: int) -> dict[str, Any]:
    """Return numbers of rows drawn where a trace has inner ones, from keys in different places."""
    plain, split, scanned, turned, chosen = jax.random.split(key, 5)

    def walk(x: Any, key: Any) -> Any:
        return x + jax.random.normal(key, x.shape), None

    def turn(carry: Any) -> Any:
        count, key, x = carry
        key, own = jax.random.split(key)
        return count + 1, key, x + jax.random.normal(own, x.shape)

    begun = jnp.zeros(rows)
    return {
        "plain": jax.random.normal(plain, (2, rows)).sum(0),
        "split": jax.vmap(jax.random.uniform)(jax.random.split(split, rows)),
        "scanned": jax.lax.scan(walk, begun, jax.random.split(scanned, 2))[0],
        "turned": jax.lax.while_loop(lambda c: c[0] < 2, turn, (0, turned, begun))[2],
        "chosen": jax.lax.cond(
            jnp.max(key_words(key)) > 0, lambda x: walk(x, chosen)[0], lambda x: x, begun
        ),
        "called": jax.jit(lambda key: jax.random.gumbel(key, (rows,)))(plain),
    }


def key_words(key: Any) -> Any:
    return jax.random.key_data(key)


def loss(w: Any, batch: Any, key: Any) -> Any:
    drawn = {**batch, "of_loss": jax.random.normal(key, batch["x"].shape)}
    return (w - batch["x"]) ** 2, {name: rx.ByRow(value) for name, value in drawn.items()}


def step(state: Any, batch: Any, key: Any) -> Any:
    seen = {
        **batch,
        **in_loops(key, len(batch["x"])),
        "of_key": jax.random.normal(key, batch["x"].shape),
    }
    means, _, rows = rx.value_and_grad(loss, rows=True)(state["w"][0], seen, key)
    everyone = rx.gather(batch["x"])
    after = {
        "w": jax.random.normal(key, (MICRO_SHARDS,)),
        "gathered": (everyone * jax.random.normal(key, everyone.shape)).sum(),
    }
    return after, {**means, **{n: rx.ByRow(rows[n]) for n in rows if n not in ("loss", "x")}}


@pytest.fixture(scope="module")
def first_steps() -> list[tuple[Any, dict[str, Any], Any]]:
    """Return state, results by row and key of a step on one device, and on four."""
    found = []
    for devices in (1, 4):
        dp = parallel(step=step, mode="exact", devices=devices, micro_shards=MICRO_SHARDS)
        state = dp.init({"w": jnp.zeros(MICRO_SHARDS), "gathered": jnp.zeros(())})
        key = step_key(jax.device_get(state))
        state, metrics = dp.step(state, DATA)
        rows = {name: v.whole() for name, v in metrics.items() if isinstance(v, rx.ByRow)}
        found.append((jax.device_get(dp.model(state)), rows, key))
    return found


def test_each_row_has_its_own_on_any_number_of_devices(first_steps: Any) -> None:
    (state, rows, _), (state_of_four, rows_of_four, _) = first_steps
    jax.tree.map(np.testing.assert_array_equal, (state, rows), (state_of_four, rows_of_four))
    assert {name: len(set(values.tolist())) for name, values in rows.items()} == dict.fromkeys(
        rows, ROWS
    )


def test_the_number_of_the_micro_shard_is_in_the_key(first_steps: Any) -> None:
    _, rows, key = first_steps[0]
    each = [
        [jax.random.normal(jax.random.fold_in(key, n), (2,)) for n in numbers]
        for numbers in (range(MICRO_SHARDS), ~np.arange(MICRO_SHARDS))
    ]
    of_loss, of_body = map(np.concatenate, each)
    np.testing.assert_array_equal(rows["of_loss"], of_loss)
    np.testing.assert_array_equal(rows["of_key"], of_body)


def test_numbers_for_the_state_and_for_gathered_rows_are_those_of_the_step(
    first_steps: Any,
) -> None:
    state, _, key = first_steps[0]
    np.testing.assert_array_equal(state["w"], jax.random.normal(key, (MICRO_SHARDS,)))
    gathered = DATA["x"] * jax.random.normal(key, (ROWS,))
    np.testing.assert_allclose(state["gathered"], gathered.sum(), rtol=1e-5)
