"""Parity finds mistakes in the step itself, not only in the loss."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support.figures import assert_mentions
from support.tiers import EXHAUSTIVE
from support.training import parallel
from verify import zoo_recipes as zoo
from verify.warm import warm_subject

from replicax.core.modes.mode_table import MODES
from replicax.core.step import loss as loss_module
from replicax.verify.facts import Facts, examine_subject
from replicax.verify.plain_step import PlainStep
from replicax.verify.program_cases import FULL, PADDED, ProgramCases
from replicax.verify.stages import run_stages
from replicax.verify.subject import Case, Subject, results_of


def subject(entry: zoo.Entry, devices: int = 4) -> Subject:
    arguments = {"mode": "shard_map", "devices": devices, **entry.arguments}
    dp = parallel(entry.loss, entry.optimizer(), **arguments)
    return warm_subject(dp, entry.model(), zoo.data(), zoo.MICRO_BATCHES, 0)


def verdicts(of: Subject, *cases: Case, facts: Facts | None = None) -> dict[str, str]:
    cases_of = ProgramCases(of, facts or examine_subject(of))
    return {
        check.case: check.verdict
        for case in cases
        for check in run_stages(cases_of.stages(case), print)
    }


def test_padding_that_counts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten mask leaves full batches right."""
    facts, sums = examine_subject(subject(zoo.Entry())), loss_module.sums
    monkeypatch.setattr(
        "replicax.core.step.objective.sums",
        lambda returned, mask, *more: sums(returned, jax.numpy.ones_like(mask), *more),
    )
    of = subject(zoo.Entry())
    assert facts.padding_is_proven
    found = verdicts(of, of.own, facts=facts)
    assert found == {
        "shard_map, full": "pass",
        "shard_map, padded": "fail",
        "shard_map, unequal weights": "fail",
    }
    # Some of its replicas and micro-batches hold only padding, whose mean is no number.
    case = of.case(of.own.mode, zoo.MICRO_BATCHES)
    check = ProgramCases(of, facts).parity(case, PADDED)
    assert (check.verdict, check.figures["rows"]) == ("fail", zoo.ROWS)


class Scaled(nnx.Module):
    """Follows a mean that stays near 1."""

    def __init__(self) -> None:
        self.scale = nnx.Param(np.ones(6, np.float32))
        self.square = nnx.BatchStat(np.ones(6, np.float32))


def scaled(model: Scaled, batch: Any, key: Any) -> Any:
    now = jax.numpy.mean(batch["x"] ** 2, axis=0)
    model.square[...] = 0.9999 * model.square[...] + 1e-4 * now
    return batch["x"] @ model.scale[...]


def test_a_small_change_is_rounded_as_the_value_that_changes() -> None:
    dp = parallel(scaled, optax.sgd(0.1), mode="jit", devices=2)
    of = warm_subject(dp, Scaled(), zoo.data(), 1, 0)
    trial = ProgramCases(of, examine_subject(of)).trial(of.own)
    path = "extras['square']"
    bound = trial.bounds(trial.expected([of.full]), [of.full], of.rows)[path]
    assert np.all(bound >= 2 * np.finfo(np.float32).eps)
    assert np.all(bound < 0.1 * np.abs(trial.expected([of.full])[path]).max())


class LeftOut:
    """Reduces nothing."""

    def init(self, params: Any) -> Any:
        return ()

    def __call__(self, sums: Any, state: Any, axis: str) -> Any:
        return sums, state


def test_a_reduction_that_is_left_out_is_named() -> None:
    of = subject(zoo.Entry(arguments={"reduction": LeftOut()}))
    check = ProgramCases(of, examine_subject(of)).parity(of.own, FULL)
    assert check.verdict == "fail"
    assert_mentions(check.cause, "own rows", "never reduced")


@EXHAUSTIVE
def test_a_key_that_all_replicas_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    of = subject(zoo.Entry(zoo.dropout))
    facts = examine_subject(of)
    assert facts.random
    assert verdicts(of, of.own, facts=facts)["shard_map, full"] == "pass"
    monkeypatch.setattr("jax.lax.axis_index", lambda axis: 0)
    other = subject(zoo.Entry(zoo.dropout))
    assert verdicts(other, other.own, facts=facts)["shard_map, full"] == "fail"


def test_an_optimizer_that_is_skipped_is_seen() -> None:
    of = subject(zoo.Entry())
    cases_of = ProgramCases(of, examine_subject(of))
    updated = of.updated
    of.updated = lambda *arguments: {  # type: ignore[method-assign]
        path: 1.1 * value for path, value in updated(*arguments).items()
    }
    check = cases_of.parity(of.own, FULL)
    assert check.verdict == "fail"
    assert check.found.startswith("params")


def test_one_device_and_several_are_told_apart() -> None:
    of = subject(zoo.Entry(zoo.dropout))
    batch = of.full
    (_, alone), (_, several) = (PlainStep(of, count)(of.state, batch) for count in (1, 4))
    assert not np.allclose(alone["loss"], several["loss"])
    found = results_of(of.state, *of.run(of.own, batch))
    np.testing.assert_allclose(found["loss"], several["loss"], rtol=1e-6)


def test_a_loss_that_differs_by_run_compares_nothing() -> None:
    of = subject(zoo.Entry())
    facts = dataclasses.replace(examine_subject(of), repeatable=False)
    assert set(verdicts(of, of.own, facts=facts).values()) == {"skip"}


def test_refusals_of_the_own_mode_fail() -> None:
    entry = zoo.BROKEN["own statistics, shard_map"]
    of = subject(entry)
    found: dict[str, Any] = verdicts(of, of.own, of.case(MODES["pmap"]))
    assert found["shard_map, full"] == "fail"
    assert found["pmap, full"] == "skip"
