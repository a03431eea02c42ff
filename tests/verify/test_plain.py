"""The reference is plain JAX: what a step computed wrongly on one device, too, is found."""

import ast
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import assert_near, normals, parallel
from verify.warm import warm_subject

import replicax as rx
from replicax.core.call_checks import CallChecks
from replicax.core.step.base import StepSums
from replicax.core.step.loss import LOSS, WeightedSum
from replicax.verify import plain
from replicax.verify.facts import Facts, examine_subject
from replicax.verify.independence import INDEPENDENT, Independence
from replicax.verify.plain_step import PlainStep
from replicax.verify.program_cases import FULL, NEGATED, PADDED, ProgramCases
from replicax.verify.subject import Subject
from replicax.verify.verify_program import check_evaluated

draw = normals(0)
BATCH = {"x": draw(16, 3), "y": draw(16), "weight": np.float32([1, -2] * 8)}
START = {"w": jnp.asarray(draw(3))}


def errors(model: Any, batch: Any, key: Any) -> Any:
    return batch["x"] @ model["w"] - batch["y"]


@jax.custom_vjp
def clip_gradient(x: Any) -> Any:
    return x


clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


def clipped(model: Any, batch: Any, key: Any) -> Any:
    return clip_gradient(errors(model, batch, key)) ** 2


def weighted(model: Any, batch: Any, key: Any) -> Any:
    return rx.Weighted(errors(model, batch, key) ** 2, batch["weight"])


def by_the_largest(model: Any, batch: Any, key: Any) -> Any:
    """Right with padding while a label is positive, as padding is 0."""
    labels, real = rx.gather((batch["y"], rx.row_weights(batch["y"])))
    return errors(model, batch, key) ** 2 / (9 + jnp.max(labels * real))


def straight_through(model: Any, batch: Any, key: Any) -> Any:
    """Padding is excluded forward, and not backward."""
    score = errors(model, batch, key)
    scores, labels, real = rx.gather((score, batch["y"], rx.row_weights(score)))
    soft = jax.nn.softmax(scores)
    hard = jax.nn.one_hot(jnp.argmax(jnp.where(real > 0, scores, -jnp.inf)), len(scores))
    return score**2 + jnp.sum((soft + jax.lax.stop_gradient(hard - soft)) * labels)


def subject(loss: Any, batch: Any = BATCH) -> Subject:
    return warm_subject(parallel(loss, optax.sgd(0.1), mode="single"), START, batch, 1, 0)


FACTS = Facts(
    repeatable=True,
    random=False,
    writes=False,
    constant_key=False,
    rows=Independence(INDEPENDENT, ""),
    takes_padding=True,
    padding_is_proven=False,
    weighs=True,
    scalars=frozenset(),
    asked=[],
    by_rank=None,
)


def verdict(of: Subject, kind: str) -> str:
    return ProgramCases(of, FACTS).parity(of.own, kind).verdict


def test_a_sum_that_is_differentiated_and_divided_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert verdict(subject(clipped), FULL) == "pass"
    objective = "replicax.core.step.objective"
    monkeypatch.setattr(f"{objective}.differentiated", lambda sums, *_: sums[LOSS].total)
    undivided = lambda sums: {LOSS: WeightedSum(sums[LOSS].total, sums[LOSS].weight)}  # noqa: E731
    monkeypatch.setattr(f"{objective}.summed", undivided)
    assert verdict(subject(clipped), FULL) == "fail"


def test_a_negative_weight_that_is_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(subject(weighted), FULL) == "pass"
    positive = property(lambda sums: jnp.where(sums.weight > 0, sums.weight, 1))
    monkeypatch.setattr(StepSums, "divisor", positive)
    assert verdict(subject(weighted), FULL) == "fail"


@pytest.mark.parametrize(("loss", "kind"), [(by_the_largest, NEGATED), (straight_through, PADDED)])
def test_padding_that_was_believed(loss: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallChecks, "_depends_on_padding", lambda *_: None)
    of = subject(loss, {**BATCH, "y": np.abs(BATCH["y"]) + 1})
    cases = ProgramCases(of, FACTS)
    assert [cases.parity(of.own, each).verdict for each in (FULL, kind)] == ["pass", "fail"]


def test_it_is_what_jax_computes() -> None:
    """As a user writes it, of the 13 real rows of 16, after two steps."""
    of = subject(weighted)
    after, metrics = PlainStep(of)(of.state, of.padded)
    real = {name: leaf[: of.real_rows] for name, leaf in BATCH.items()}

    def mean(params: Any) -> Any:
        return jnp.sum(errors(params, real, None) ** 2 * real["weight"]) / real["weight"].sum()

    value, gradient = jax.value_and_grad(mean)(of.state.params)
    assert_near(after.opt_state[0], gradient)
    assert_near(after.params, {"w": of.state.params["w"] - 0.1 * gradient["w"]})
    assert_near(metrics[LOSS], value)


def test_padding_that_a_backward_pass_sees_is_not_proven() -> None:
    facts = examine_subject(subject(straight_through))
    assert facts.takes_padding
    assert not facts.padding_is_proven


def test_it_uses_nothing_of_a_step_that_computes() -> None:
    taken = {
        (each.module, name.name)
        for each in ast.walk(ast.parse(inspect.getsource(plain)))
        if isinstance(each, ast.ImportFrom) and str(each.module).startswith("replicax.core.step")
        for name in each.names
    }
    calls = {("replicax.core.step.loss", name) for name in ("LOSS", "Weighted", "call")}
    assert taken == calls | {("replicax.core.step.loss_context", "inside")}


def test_replicas_and_micro_batches_are_parts_of_one_mean() -> None:
    of = subject(weighted)
    _, whole = PlainStep(of)(of.state, of.full)
    for replicas, parts in ((2, 1), (1, 2), (2, 2)):
        _, found = PlainStep(of, replicas, parts)(of.state, of.full)
        np.testing.assert_allclose(found[LOSS], whole[LOSS], rtol=1e-6)


def sum_in_evaluation(model: Any, batch: Any, key: Any) -> Any:
    values = errors(model, batch, key) ** 2
    return jnp.sum(values) if key is None else values


def mean_in_evaluation(model: Any, batch: Any, key: Any) -> Any:
    values = errors(model, batch, key) ** 2
    return jnp.mean(values) if key is None else values


def test_a_sum_in_evaluation_is_no_mean() -> None:
    of = subject(sum_in_evaluation)
    assert [check.case for check in check_evaluated(of)] == ["evaluation"]
    for right in (mean_in_evaluation, weighted):
        assert not [*check_evaluated(subject(right))]
