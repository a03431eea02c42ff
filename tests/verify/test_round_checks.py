"""The checks of a step with rounds: they pass, and fail where an identity is broken."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.command_line import Main
from support.recipe_runs import MLP
from support.rounds import MODEL, SOURCE, noisy, on, over, own_step, squared

import replicax as rx
from replicax.core.ground.codecs import Integers
from replicax.text.checks import Check
from replicax.verify.round_checks import CLOSE, check_rounds

CASES = [
    *("SGD, 1 step", "1 island, 2 steps", "4 equal islands", "inner steps"),
    *("send int4", "bytes", "outer parameters", "two transports"),
]


def checked(dp: rx.DataParallel, model: Any = MODEL) -> dict[str, Check]:
    return {each.case: each for each in check_rounds(dp, model, SOURCE, 0, lambda _: None)}


def verdicts(checks: dict[str, Check]) -> dict[str, str]:
    return {case: each.verdict for case, each in checks.items()}


def test_a_step_with_rounds_passes() -> None:
    islands = over(6, send="int4", fragments=2, delay=1, mix=0.5, outer=None)
    found = checked(on(4, islands, optimizer=optax.adam(1e-2)))
    assert verdicts(found) == dict.fromkeys(CASES, "pass")
    assert found["SGD, 1 step"].figures["relative"] < CLOSE
    # Blocks of a and c, and of b: 34 bytes of 64 values.
    assert found["bytes"].figures["payload"] == 3 * 34
    assert found["bytes"].figures["moved"] == 4 * (3 * 34 + 2 * 4 * 4)


def test_the_islands_of_a_job_are_checked_as_replicas() -> None:
    dp = on(4, rx.Rounds(30, "int4"), mode="jit", loss=noisy, layout="fsdp")
    found = verdicts(checked(dp))
    assert found.pop("4 equal islands") == "skip"  # random numbers differ
    assert set(found.values()) == {"pass"}


def test_a_step_of_ones_own_passes_all_but_sgd() -> None:
    found = verdicts(checked(on(2, over(2), step=own_step, loss=squared)))
    assert found.pop("SGD, 1 step") == "skip"
    assert set(found.values()) == {"pass"}


def test_a_loss_that_reduces_by_itself_fails() -> None:
    def asking(model: Any, batch: Any, key: Any) -> Any:
        values = squared(model, batch, key)
        try:
            return values + 0 * jax.lax.pmean(values.mean(), "data")
        except NameError:
            return values

    found = checked(on(2, over(2), loss=asking))
    assert found["inner steps"].verdict == "fail"
    assert set(found["inner steps"].figures["collectives"]) == {"all-reduce"}


@dataclasses.dataclass(frozen=True)
class Coarse(Integers):
    """A codec that promises the error of 8 bits, and has that of 4."""

    error: float = 0.5 / 127

    def encode(self, vector: jax.Array) -> jax.Array:
        return super().encode(jnp.round(vector * 4) / 4)


def test_a_codec_that_promises_too_much_fails() -> None:
    found = checked(on(2, over(2, send=Coarse("coarse", 8))))
    assert found["send coarse"].verdict == "fail"
    assert found["send coarse"].figures["error"] > found["send coarse"].figures["bound"]


def forgetful() -> optax.GradientTransformation:
    """Return an inner optimizer that takes other steps in each program."""
    programs = iter(range(100))

    def update(gradient: Any, state: Any, params: Any = None) -> Any:
        rate = 0.1 * (1 + next(programs))
        return jax.tree.map(lambda leaf: -rate * leaf, gradient), state

    return optax.GradientTransformation(lambda params: (), update)


def test_an_optimizer_that_differs_between_programs_fails() -> None:
    found = checked(on(2, over(2), optimizer=forgetful()))
    assert found["1 island, 2 steps"].verdict == "fail"


@pytest.mark.exhaustive
def test_the_command_checks_rounds_and_the_rest(main: Main, folder: Path) -> None:
    flags = ["--devices", "2", "--mode", "shard_map", "--modes", "shard_map"]
    code, out, _ = main("verify", *MLP, *flags, "--every", "3", "--island-axis", "data", "--json")
    found = json.loads(out)
    assert code == 0
    subjects = {each["subject"]: each["verdict"] for each in found["checks"]}
    assert {"rounds", "parity", "traffic"} <= subjects.keys()
    assert found["about"]["rounds"]["every"] == 3
    cases = [each["case"] for each in found["checks"] if each["subject"] == "rounds"]
    assert "two transports" in cases
