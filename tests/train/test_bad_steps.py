"""Bad steps are recorded later with their examples; too many in a row end the run."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.figures import assert_mentions, figures
from support.processes import SUPPORT, run_job

import replicax as rx
from replicax.core.data.batch import Batch
from replicax.core.data.rows import OpenedRows
from replicax.core.ground.job import Alone
from replicax.errors import DivergedError, StateError
from replicax.train.dispatched import Finished, RunPosition, dispatched
from replicax.train.files.records import Record
from replicax.train.guarded import NOT_FINITE, SPIKE
from replicax.train.run.step_records import BadSteps


def batch(step: int, rows: int = 3, size: int = 4) -> Batch:
    """Return a padded batch of the examples 10 * step, 10 * step + 1, ..., in reverse order."""
    index = 10 * step + np.arange(rows)[::-1]
    host = OpenedRows({"x": np.zeros(rows, np.float32)}).padded(size, index)
    return jax.tree.map(jnp.asarray, host)


def done(step: int, kind: str, spikes: bool = False, **options: Any) -> Finished:
    loss = jnp.float32(np.nan if kind == "nan" else 9.0 if kind == "spike" else 0.5)
    metrics = {"loss": loss, NOT_FINITE: jnp.bool_(kind == "nan")}
    if spikes:
        metrics[SPIKE] = jnp.bool_(kind == "spike")
    place = RunPosition(step, step // 100, step)
    return Finished(dispatched(place, batch(step, **options), metrics), 0, 1, 1)


def follow(bad: BadSteps, kinds: dict[int, str], **options: Any) -> list[Record]:
    """Return the records of finished steps with these numbers and kinds."""
    return [r for step, kind in kinds.items() for r in bad.finished(done(step, kind, **options))]


def run_of(kind: str, first: int, count: int) -> dict[int, str]:
    return dict.fromkeys(range(first, first + count), kind)


def test_a_spike_is_told_from_a_loss_that_is_not_finite() -> None:
    bad = BadSteps(9, Alone())
    spike, nan = follow(bad, {1: "spike", 2: "nan", 3: "good"}, spikes=True)
    assert spike.metrics == {"loss": 9.0, "spike": 1.0}
    assert set(nan.metrics) == {"loss"}


@pytest.mark.promise("checkpoints.bad-steps")
@pytest.mark.parametrize("most", [1, 2, 5])
def test_too_many_in_a_row_end_the_run(most: int) -> None:
    bad = BadSteps(most, Alone())
    records = follow(bad, run_of("nan", 120, most - 1) | {119 + most: "good"})
    bad.check()
    assert len(records) == most - 1
    assert len(follow(bad, run_of("nan", 320, most))) == most
    with pytest.raises(DivergedError) as ended:
        bad.check()
    said = str(ended.value)
    shown = [str(most), "320", str(319 + most)] if most > 1 else ["320"]
    assert figures(said)[: len(shown)] == shown
    assert re.match(r"the loss\b.*\bgradient\b.*not finite\b", said)
    assert_mentions(said, "learning rate", "clip", "these examples")
    assert "examples 3202, 3201, 3200 of epoch 3" in said
    assert "\n" not in said


@pytest.mark.promise("outside.not-finite")
@pytest.mark.parametrize("own", [False, True])
def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_named(own: bool) -> None:
    def masked(model: Any, batch: Any, key: Any) -> Any:
        roots = jnp.sqrt(batch["x"] * model["w"]) + model["b"]
        return rx.Weighted(roots, batch["x"] > 0)

    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(masked)(state, batch, key)
        return jax.tree.map(jnp.subtract, state, gradient), means

    dp = rx.DataParallel(step=step) if own else rx.DataParallel(masked, optax.sgd(0.1))
    state = dp.init({"b": jnp.zeros(()), "w": jnp.ones(())})
    data = {"x": np.arange(16, dtype=np.float32)}
    guard = rx.Guard(max_bad_steps=2)
    with pytest.raises(DivergedError) as ended:
        rx.fit(dp, state, data, batch_size=16, steps=3, guard=guard, progress=False)
    assert_mentions(str(ended.value), "state['w']" if own else "['w']", "finite", "mask")
    assert "['b']" not in str(ended.value)


def test_a_skip_is_recorded_after_the_steps_before_it() -> None:
    loss = lambda model, batch, key: batch["x"] * model["w"]  # noqa: E731
    dp = rx.DataParallel(loss, optax.sgd(0.1), mode="single")
    data = {"x": np.float32([1, 1, 1, 1, np.nan, 1, 1, 1])}
    state = dp.init({"w": jnp.ones(())})
    settings = {"batch_size": 2, "steps": 4, "shuffle": False, "log_every": 1, "progress": False}
    found = rx.fit(dp, state, data, **settings).records
    kinds = [(1, "train"), (2, "train"), (3, "skip"), (3, "train"), (4, "train")]
    assert [(each.step, each.kind) for each in found] == kinds


def test_spikes_count_too_and_are_named() -> None:
    bad = BadSteps(2, Alone())
    follow(bad, {1: "spike", 2: "spike"}, spikes=True)
    with pytest.raises(DivergedError, match=r"^the loss\b.*\babove\b.*\bin 2 steps"):
        bad.check()
    bad = BadSteps(2, Alone())
    follow(bad, {1: "spike", 2: "nan"}, spikes=True)
    with pytest.raises(DivergedError, match=r"\babove\b.*\bor\b.*\bgradient\b.*\bnot"):
        bad.check()


def test_a_resumed_row_goes_on() -> None:
    bad = BadSteps(4, Alone())
    bad.in_a_row = 2
    bad.check()
    follow(bad, run_of("nan", 7, 2))
    with pytest.raises(DivergedError, match=r"4 steps in\b.*5 to 8 \(step 7 on examples 72, "):
        bad.check()


def test_steps_to_be_done_again_are_forgotten() -> None:
    bad = BadSteps(3, Alone())
    follow(bad, {4: "nan", 5: "nan"})
    bad.rewind(1)
    follow(bad, {5: "nan"})
    bad.check()
    assert bad.in_a_row == 2


def test_many_examples_are_named_in_part() -> None:
    bad = BadSteps(1, Alone())
    (record,) = bad.finished(done(1, "nan", rows=64, size=64))
    assert record.examples == tuple(range(73, 9, -1))
    with pytest.raises(DivergedError, match=r"on examples 73, (\d\d, ){6}66, \.\.\. of epoch 0\)"):
        bad.check()


def test_processes_skip_and_end_alike() -> None:
    ended = run_job(SUPPORT / "job_bad_steps.py")
    told = [each.out[each.out.index("norm") :] for each in ended]  # Gloo speaks before
    assert told[0] == told[1], ended
    first = told[0].splitlines()
    skipped = [line.split()[1:] for line in first if line.startswith("skip")]
    third = ",".join(map(str, range(16, 24)))
    assert skipped == [
        ["3", "0", third, "8"],
        ["7", "1", third, "8"],
        ["9", "2", ",".join(map(str, range(8))), "8"],
        ["10", "2", ",".join(map(str, range(8, 16))), "8"],
    ]
    norms = [line for line in first if line.startswith("norm")]
    assert [line.split()[-1] for line in norms] == ["4", "8", "12"]
    assert norms[2].split()[1] == norms[1].split()[1] != norms[0].split()[1]
    assert {each.code for each in ended} == {1}
    said = "finite in 2 steps in a row, 9 to 10 (first on examples 0, 1, 2,"
    assert all(said in each.err for each in ended)  # or one reports the end of the other


@pytest.mark.promise("outside.not-finite")
@pytest.mark.parametrize("leaves_early", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"layout": "zero1"}, {"mode": "shard_map", "layout": "fsdp"}], ids=str
)
def test_weights_that_end_infinite_are_no_result(how: dict[str, Any], leaves_early: bool) -> None:
    rows = {"x": np.ones((8, 8), np.float32)}
    model = {"w": jnp.full(8, 9.0), "never": jnp.full(8, -jnp.inf)}
    dp = rx.DataParallel(
        lambda model, batch, key: (batch["x"] @ model["w"]) ** 2, optax.sgd(1e38), **how
    )
    run = rx.Run(dp, dp.init(model), rows, batch_size=8, epochs=2, progress=False).__enter__()
    for batch in run:
        run.step(batch)
        if leaves_early:
            break
    with pytest.raises(DivergedError, match=r"params\.w"):
        run.__exit__(None, None, None)


def test_weights_that_never_were_finite_may_stay_so() -> None:
    model = {"w": jnp.ones(8), "never": jnp.full(8, -jnp.inf)}
    dp = rx.DataParallel(lambda model, batch, key: batch["x"] @ model["w"], optax.sgd(0.1))
    rows = {"x": np.ones((8, 8), np.float32)}
    assert rx.fit(dp, dp.init(model), rows, batch_size=8, epochs=1, progress=False).steps == 1


def test_a_consumed_state_is_refused_at_the_start_and_at_the_end(tmp_path: Path) -> None:
    rows = {"x": np.ones((8, 8), np.float32)}
    dp = rx.DataParallel(lambda model, batch, key: batch["x"] @ model["w"], optax.sgd(0.1))
    state = dp.init({"w": jnp.ones(8)})
    rx.fit(dp, state, rows, batch_size=8, epochs=1, progress=False)
    for folder in (None, tmp_path / "run"):
        with pytest.raises(StateError):
            rx.fit(dp, state, rows, batch_size=8, epochs=1, progress=False, run_dir=folder)
    assert not (tmp_path / "run").exists()
    state = dp.init({"w": jnp.ones(8)})
    run = rx.Run(dp, state, rows, batch_size=8, epochs=1, progress=False).__enter__()
    dp.step(run.state, next(iter(run)))
    with pytest.raises(StateError):
        run.__exit__(None, None, None)
