"""Checks beside parity: learning parameters, equal copies, equal bits, one compilation."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from support.bit_flips import before_step, flip_leaf
from verify import zoo_recipes as zoo
from verify.warm import warm_subject

import replicax as rx
from replicax.verify.facts import examine_subject
from replicax.verify.plain_step import PlainStep
from replicax.verify.program_cases import ProgramCases
from replicax.verify.step_checks import determinism
from replicax.verify.subject import Subject
from replicax.verify.trial import Trial


def cases_of(entry: zoo.Entry, **arguments: Any) -> tuple[Subject, ProgramCases]:
    arguments = {"mode": "single", **arguments}
    dp = rx.DataParallel(entry.loss, entry.optimizer(), **arguments)
    subject = warm_subject(dp, entry.model(), zoo.data(), 1, 0)
    return subject, ProgramCases(subject, examine_subject(subject))


@pytest.mark.parametrize(
    ("name", "gradient", "update"),
    [
        ("plain", "pass", "pass"),
        ("gate of 0", "pass", "pass"),
        ("frozen by stop_gradient", "note", "pass"),
        ("frozen by optax", "pass", "note"),
        ("dead parameter", "fail", "pass"),
    ],
)
def test_parameters_that_do_not_learn(name: str, gradient: str, update: str) -> None:
    _, cases = cases_of({**zoo.CORRECT, **zoo.BROKEN}[name])
    found = {check.case: check for check in cases.parameters()}
    assert (found["gradient"].verdict, found["update"].verdict) == (gradient, update)
    dead = ["['unused']"] if name == "dead parameter" else []
    assert found["gradient"].figures["dead"] == dead


def flip_first_weight(state: rx.TrainState) -> rx.TrainState:
    return flip_leaf(state, 1, jax.devices()[3], byte=1, bit=2)


@pytest.mark.promise("verify.replicas-agree")
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(("layout", "fsdp"), [("replicated", 1), ("fsdp", 4)])
def test_a_flipped_bit_fails(layout: str, fsdp: int, flipped: bool) -> None:
    """Split parameters have a copy in each group of replicas that shares one."""
    mesh = rx.make_mesh(fsdp=fsdp)
    subject, cases = cases_of(zoo.Entry(), mode="shard_map", mesh=mesh, layout=layout)
    with before_step(2, flip_first_weight) if flipped else contextlib.nullcontext():
        check = cases.replicas(subject.own)
    assert check.verdict == ("fail" if flipped else "pass")
    assert ("params" in check.found) == flipped


@pytest.mark.parametrize(
    ("loss", "runs", "traces"),
    [
        (zoo.good, "pass", "pass"),
        (zoo.dropout, "pass", "pass"),
        (zoo.host_random, "fail", "pass"),
        (zoo.traced_random, "pass", "fail"),
    ],
)
def test_two_runs_and_two_traces(loss: Any, runs: str, traces: str) -> None:
    subject, cases = cases_of(zoo.Entry(loss))
    trial = cases.trial(subject.own)
    found = determinism(trial, subject.full, *(trial.run([subject.full]) for _ in range(2)))
    assert [found.verdict, cases.traces(trial).verdict] == [runs, traces]
    assert ("pure_callback" in found.cause) == (runs == "fail")
    facts = examine_subject(subject)
    assert (facts.repeatable, facts.random) == (runs == "pass", loss is zoo.dropout)


def test_a_batch_of_another_shape_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, cases = cases_of(zoo.Entry())
    assert cases.recompilation().verdict == "pass"
    fewer = jax.tree.map(lambda leaf: leaf[:-8], subject.padded)
    monkeypatch.setattr(subject, "padded", fewer)
    assert ProgramCases(subject, examine_subject(subject)).recompilation().verdict == "fail"


def test_the_reference_is_run_once_for_the_compared_state() -> None:
    subject, _ = cases_of(zoo.Entry())
    reference, state = PlainStep(subject), subject.state
    first = reference.gradient(state, subject.full)
    assert reference.gradient(state, subject.full) is first
    assert reference.gradient(dataclasses.replace(state), subject.full) is not first


def test_rounding_with_other_weights_is_that_of_all_rows() -> None:
    subject, cases = cases_of(zoo.Entry())
    trial = cases.trial(subject.own)
    for batches in ([subject.padded], [subject.weighted]):
        expected = trial.expected(batches)
        known, measured = trial.noise(expected, batches), Trial.noise(trial, expected, batches)
        for path in [path for path in measured if path.startswith("gradient")]:
            assert 1 / 3 < np.linalg.norm(known[path]) / np.linalg.norm(measured[path]) < 3
