"""`verify` checks the guarded step of a run, which skips bad steps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.tiers import EXHAUSTIVE, only
from support.training import parallel
from verify import zoo_recipes as zoo
from verify.warm import warm_subject

import replicax as rx
from replicax.errors import LossError
from replicax.text.checks import Check
from replicax.verify.exactness import bits_on, check_exactness, replica_counts
from replicax.verify.facts import examine_subject
from replicax.verify.program_cases import ProgramCases
from replicax.verify.stages import run_stages


def data_parallel(loss: Any, optimizer: Any, **options: Any) -> rx.DataParallel:
    return parallel(loss, optimizer, devices=zoo.DEVICES, **options)


def restless() -> optax.GradientTransformation:
    """Its state is alternately an integer and a float."""

    def turned(gradient: Any, count: jax.Array, params: Any = None) -> Any:
        return gradient, count.astype(jnp.float32 if count.dtype == jnp.int32 else jnp.int32)

    return optax.GradientTransformation(lambda params: jnp.int32(0), turned)


def test_a_step_that_can_be_taken_and_not_skipped_fails() -> None:
    dp = data_parallel(zoo.good, optax.chain(restless(), optax.sgd(0.1)))
    state = dp.init(zoo.network())
    for _ in range(2):
        state, _ = dp.step(state, zoo.data())
    verification = rx.verify(dp, zoo.network(), zoo.data(), modes=["jit"], micro_batches=1)
    assert verification.failed[0].case == "jit, full"
    assert all("opt_state[1][0]" in check.found for check in verification.failed)


@EXHAUSTIVE
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_a_bfloat16_leaf_among_float32_ones_passes_and_trains(mode: str) -> None:
    dp = data_parallel(zoo.good, optax.adam(1e-2), mode=mode)
    verification = rx.verify(dp, zoo.bfloat16_leaf(), zoo.data(), modes=[mode], micro_batches=1)
    assert verification.ok, [check.found for check in verification.failed]
    state = dp.init(zoo.bfloat16_leaf())
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
    run = rx.fit(dp, state, zoo.data(), batch_size=16, epochs=1, progress=False)
    assert jax.tree.map(lambda leaf: leaf.dtype, run.state) == dtypes
    assert run.state.step == 2


def not_finite_on_few_rows(model: Any, batch: Any, key: Any) -> Any:
    """The value of a row, with a NaN gradient on a part of the batch."""
    values = zoo.errors(model, batch)
    if key is not None and batch["x"].shape[0] != zoo.ROWS:
        values += jnp.sqrt(0 * model["bias"][0])
    return rx.independent(values)


@pytest.mark.parametrize("mode", only(["shard_map"], ["shard_map", "exact"]))
def test_a_step_that_is_skipped_fails(mode: str) -> None:
    dp = data_parallel(not_finite_on_few_rows, optax.adam(1e-2), mode=mode)
    of = warm_subject(dp, zoo.network(), zoo.data(), 1, 0)
    facts = examine_subject(of)
    checks: list[Check] = list(run_stages(ProgramCases(of, facts).stages(of.own), print))
    if dp.mode.bitwise:
        bits = partial(bits_on, of, facts, dp.mode)
        counts = replica_counts(dp)
        checks.append(check_exactness(dp.mode, counts, bits, True))
    assert {check.verdict for check in checks} == {"fail"}
    assert all("skipped" in check.found for check in checks)


def test_a_loss_that_is_never_finite_is_refused() -> None:
    dp = data_parallel(lambda *given: zoo.good(*given) / 0, optax.adam(1e-2))
    with pytest.raises(LossError, match="step 1"):
        warm_subject(dp, zoo.network(), zoo.data(), 1, 0)
