"""Rounds with model state, uneven rows, bad steps, steps of one's own, and what a run does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import CASES
from support.rounds import (
    BATCH,
    MODEL,
    PLAIN,
    SOURCE,
    assert_close,
    assert_same,
    on,
    over,
    own_step,
    squared,
    train,
)

import replicax as rx


def test_model_state_is_averaged() -> None:
    case = CASES["linen"]
    dp = on(2, over(3), loss=case.loss)
    state, _ = train(dp, case.model(), case.source, steps=2)
    own = [np.asarray(leaf) for leaf in jax.tree.leaves(state.islands.inner.extras)]
    assert all(np.abs(leaf[0] - leaf[1]).max() > 0 for leaf in own)
    after = dp.end_round(jax.tree.map(jnp.copy, state))
    for leaf, each, new in zip(
        own, jax.tree.leaves(after.islands.inner.extras), jax.tree.leaves(after.extras), strict=True
    ):
        np.testing.assert_allclose(new, leaf.mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(each, np.stack([new, new]))


def test_frozen_parameters_stay() -> None:
    dp = on(2, over(2, send="int4"), trainable="a|b")
    state, _ = train(dp, steps=4)
    np.testing.assert_array_equal(state.params["c"], MODEL["c"])
    assert not np.array_equal(state.params["a"], MODEL["a"])
    wanted, _ = train(on(2, over(1)), steps=4)
    assert not np.array_equal(wanted.params["c"], MODEL["c"])


def test_islands_with_padding_count_by_their_rows() -> None:
    # 20 rows in batches of 16: the last has 4 rows, all on the first of two islands.
    rows = {name: each[:20] for name, each in SOURCE.items()}
    state, _ = train(on(2, over(2)), source=rows, steps=2)
    first, _ = train(on(1), source={n: r[:8] for n, r in rows.items()}, steps=1, size=8)
    first, _ = train(
        on(1), first.params, {n: r[16:] for n, r in rows.items()}, steps=1, size=4
    )  # 8 + 4 rows
    second, _ = train(on(1), source={n: r[8:16] for n, r in rows.items()}, steps=1, size=8)
    wanted = jax.tree.map(
        lambda a, b: (12 * np.asarray(a) + 8 * np.asarray(b)) / 20, first.params, second.params
    )
    assert_close(state.params, wanted, 1e-5)


def test_a_bad_step_of_one_island_is_skipped_there_and_has_no_weight() -> None:
    rows = {name: each[:32].copy() for name, each in SOURCE.items()}
    rows["x"][8:16] = np.nan  # those of the second island, in the first batch
    dp = on(2, over(2))
    result = rx.fit(
        dp, dp.init(MODEL), rows, batch_size=BATCH, steps=2, shuffle=False, progress=False
    )
    assert [record.step for record in result.records if record.kind == "skip"] == [1]
    first, _ = train(on(1), source={n: r[:8] for n, r in rows.items()}, steps=1, size=8)
    first, _ = train(on(1), first.params, {n: r[16:24] for n, r in rows.items()}, steps=1, size=8)
    second, _ = train(on(1), source={n: r[24:] for n, r in rows.items()}, steps=1, size=8)
    wanted = jax.tree.map(
        lambda a, b: (16 * np.asarray(a) + 8 * np.asarray(b)) / 24, first.params, second.params
    )
    assert_close(result.state.params, wanted, 1e-5)


def test_a_step_of_ones_own() -> None:
    wanted, plain = train(on(2, over(2)))
    found, told = train(on(2, over(2), step=own_step, loss=squared))
    assert_close(found.params, wanted.params, 1e-5)
    np.testing.assert_allclose(
        [each["loss"] for each in told], [each["loss"] for each in plain], rtol=1e-5
    )


def test_records_have_the_loss_of_rounds_once_one_ends() -> None:
    dp = on(2, over(3))
    result = rx.fit(
        dp,
        dp.init(MODEL),
        SOURCE,
        batch_size=BATCH,
        steps=9,
        log_every=2,
        shuffle=False,
        progress=False,
    )
    trained = [record for record in result.records if record.kind == "train"]
    assert [record.step for record in trained] == [1, 2, 4, 6, 8, 9]
    known = [record.metrics.get("round_loss") for record in trained]
    assert [value is not None for value in known] == [False, False, True, True, False, True]
    _, told = train(on(2, over(3)), steps=9)
    ends = [each["round_loss"] for each in told if not np.isnan(each["round_loss"])]
    np.testing.assert_allclose([value for value in known if value is not None], ends, rtol=1e-5)
    losses = np.reshape([each["loss"] for each in told], (3, 3)).mean(1)
    np.testing.assert_allclose(ends, losses, rtol=1e-5)


def test_evaluation_and_the_model_have_the_outer_parameters() -> None:
    dp = on(2, over(3, outer=optax.sgd(0.5)))
    state, _ = train(dp, steps=4)
    assert_same(dp.model(state), jax.device_get(state.params))
    plain = on(2)
    wanted = plain.evaluate(plain.init(dp.model(state)), plain.feed(SOURCE, BATCH))
    found = dp.evaluate(state, dp.feed(SOURCE, BATCH))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("rounds", [over(3, send="int4"), rx.Rounds(3, "int4", PLAIN)])
def test_a_run_that_stops_within_a_round_goes_on_with_the_same_bits(
    rounds: rx.Rounds, folder: Any
) -> None:
    settings: dict[str, Any] = {"batch_size": BATCH, "progress": False, "log_every": 2}
    devices = 1 if rounds.axis is None else 2

    def run(steps: int, name: str) -> rx.types.Fit:
        dp = on(devices, rounds)
        return rx.fit(dp, dp.init(MODEL), SOURCE, steps=steps, run_dir=name, **settings)

    whole = run(8, "whole")
    dp = on(devices, rounds)
    with rx.Run(dp, dp.init(MODEL), SOURCE, steps=8, run_dir="cut", **settings) as cut:
        for batch in cut:
            cut.step(batch)
            if cut.place.step == 5:
                break
    again = run(8, "cut")
    assert again.steps < 8
    assert_same(again.state, jax.device_get(whole.state))
    assert [r.metrics for r in again.records] == [r.metrics for r in whole.records]
