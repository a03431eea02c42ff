"""Reductions that round may change as much as they declare, and no more."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.tiers import EXHAUSTIVE, only
from support.training import parallel
from verify import zoo_recipes as zoo
from verify.warm import warm_subject

from replicax.core.ground.codecs import BLOCK
from replicax.core.modes.mode_table import MODES
from replicax.core.step.base import StepSums
from replicax.core.step.coded import Coded
from replicax.core.step.reduction import REDUCTIONS, Reduction, Wire
from replicax.text.checks import Check
from replicax.verify.facts import examine_subject
from replicax.verify.program_cases import ProgramCases
from replicax.verify.residual import check_residual
from replicax.verify.stages import run_stages
from replicax.verify.subject import Subject
from replicax.verify.traffic import check_traffic, read_programs

IN_EVERY_MODE = pytest.mark.parametrize(
    "mode", only(["shard_map", "exact"], ["shard_map", "pmap", "exact"])
)


def make(
    mode: str, reduction: str | Reduction = "bfloat16", loss: Any = zoo.good, **options: Any
) -> Subject:
    options |= {"devices": zoo.DEVICES, "mode": mode, "reduction": reduction}
    dp = parallel(loss, optax.adam(1e-2), **options)
    return warm_subject(dp, zoo.network(), zoo.data(), 1, 0)


def checks(subject: Subject) -> list[Check]:
    cases = ProgramCases(subject, examine_subject(subject))
    return list(run_stages(cases.stages(subject.own), print))


def verdicts(subject: Subject) -> list[str]:
    return [check.verdict for check in checks(subject)]


@IN_EVERY_MODE
def test_bfloat16_passes_near_its_bound_and_sends_half(mode: str) -> None:
    subject = make(mode)
    parity = checks(subject)
    assert [check.verdict for check in parity] == ["pass"] * 3
    assert all(0.2 < check.figures["of_bound"] <= 1 for check in parity)
    programs = read_programs(subject, [subject.own])
    (traffic,) = check_traffic(subject, examine_subject(subject), programs)
    half = 2 * 3 / 4 * (2 * (6 * 8 + 8 + 8 * 4) + 12)
    assert traffic.figures["least_bytes"] == half
    assert traffic.figures["bytes"] <= 1.05 * half


@pytest.mark.parametrize("layout", only(["replicated"], ["replicated", "zero1"]))
@pytest.mark.parametrize(("send", "share"), [("int8", 0.0072), ("int4", 0.13)])
def test_coded_passes_near_its_bound_and_sends_its_bytes(
    send: str, share: float, layout: str
) -> None:
    subject = make("shard_map", send, layout=layout)
    parity = checks(subject)
    assert [check.verdict for check in parity] == ["pass"] * 3
    assert all(0.2 < check.figures["of_bound"] <= 1 for check in parity)
    facts = examine_subject(subject)
    (traffic,) = check_traffic(subject, facts, read_programs(subject, [subject.own]))
    assert traffic.verdict == "pass" or layout == "zero1"  # whose guard sends a few bytes
    blocks = {"int8": 64 + 2, "int4": 32 + 2}[send] * 4  # one for each leaf: three, for 4 replicas
    gathered = 4 * (6 * 8 + 8 + 8 * 4) * 3 / 4 if layout == "zero1" else 0
    assert traffic.figures["least_bytes"] == 2 * 3 / 4 * (blocks + 12) + gathered
    assert traffic.figures["bytes"] <= 1.05 * traffic.figures["least_bytes"]
    (kept,) = check_residual(ProgramCases(subject, facts).trial(subject.own), subject.full)
    assert (kept.subject, kept.verdict, kept.figures["differing"]) == ("residual", "pass", 0)
    assert kept.figures["share"] == pytest.approx(share, rel=0.5)


class Forgetful(Coded):
    """Keeps what its own encoding loses, but not what that of the sum does."""

    def _sum(self, vector: jax.Array, axis: Any) -> tuple[jax.Array, jax.Array]:
        total, lost = super()._sum(vector, axis)
        own = jnp.arange(lost.size) // BLOCK == lax.axis_index(axis)
        return total, jnp.where(own, 0, lost)


class Careless(Coded):
    """Declares an eighth of its error."""

    def error(self, roundings: int = 2) -> float:
        return super().error(roundings) / 8


@pytest.mark.parametrize(
    ("broken", "parity", "residual"), [(Forgetful, "pass", "fail"), (Careless, "fail", "pass")]
)
def test_a_broken_coded_one_fails(broken: type[Coded], parity: str, residual: str) -> None:
    subject = make("shard_map", broken("int4"))
    assert verdicts(subject) == [parity] * 3
    trial = ProgramCases(subject, examine_subject(subject)).trial(subject.own)
    assert [check.verdict for check in check_residual(trial, subject.full)] == [residual]


@EXHAUSTIVE
def test_each_replica_has_random_numbers_of_its_own() -> None:
    assert verdicts(make("shard_map", loss=zoo.dropout)) == ["pass"] * 3


class Dropping(Wire):
    """Leaves out the last replica."""

    def add(self, sums: Any, axis: Any, *sum_rows: Any) -> Any:
        return super().add(self.without_last(sums, axis), axis, *sum_rows)

    def without_last(self, sums: Any, axis: str | None) -> Any:
        if axis is None or not isinstance(sums, StepSums):
            return sums
        counts = lax.axis_index(axis) < lax.axis_size(axis) - 1
        gradient = jax.tree.map(lambda leaf: leaf * counts, sums.gradient)
        return dataclasses.replace(sums, gradient=gradient)


class Coarse(Wire):
    """Rounds to 3 bits but declares bfloat16's 8."""

    def _round(self, leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float8_e5m2).astype(leaf.dtype)

    def _send(self, array: jax.Array, move: Any) -> jax.Array:
        return super()._send(self._round(array), move)


class Silent(Wire):
    """Rounds to bfloat16 without declaring it."""

    def error(self, roundings: int = 2) -> float:
        return 0.0


@pytest.mark.parametrize("mode", only(["shard_map"], ["shard_map", "pmap", "exact"]))
@pytest.mark.parametrize("broken", only([Dropping], [Dropping, Coarse, Silent]))
def test_a_broken_one_fails(broken: type[Wire], mode: str) -> None:
    assert verdicts(make(mode, broken("bfloat16", jnp.bfloat16))) == ["fail"] * 3


class Sum:
    """The plain sum, with a state that counts its steps."""

    def init(self, params: Any) -> Any:
        return {"steps": jnp.int32(7)}

    def __call__(self, sums: StepSums, state: Any, axis: str) -> tuple[StepSums, Any]:
        return lax.psum(sums, axis), {"steps": state["steps"] + 1}


def test_one_with_a_state_passes_and_the_other_modes_go_without() -> None:
    subject = make("shard_map", Sum())
    assert verdicts(subject) == ["pass"] * 3
    after, _ = subject.run(subject.own, subject.full)
    np.testing.assert_array_equal(after.reduction["steps"], np.full(zoo.DEVICES, 8))
    float32 = REDUCTIONS["float32"]
    for case in (subject.case(MODES["single"]), subject.case(MODES["jit"])):
        assert subject.parallel(case).reduction == float32
    cases = ProgramCases(subject, examine_subject(subject))
    others = [subject.case(MODES[name]) for name in ("jit", "pmap", "exact")]
    found = [check for case in others for check in run_stages(cases.stages(case), print)]
    assert [check.verdict for check in found] == ["pass"] * 6 + ["skip"] * 3
