"""Each mistake is named from its numbers; other differences are called unexplained."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.figures import assert_mentions

from replicax.verify.causes import NO_CAUSE, likely_cause
from replicax.verify.difference import Leaves
from replicax.verify.evidence import Evidence, Hypothesis

N, ROWS = 4, 32
X = np.random.default_rng(0).standard_normal((ROWS, 5))
UNEQUAL = np.where(np.arange(ROWS) < 20, 1.0, 0.25)


def weighted_mean(indices: np.ndarray, weights: np.ndarray) -> Leaves:
    """Loss and gradient of a mean over rows: linear in them."""
    w = weights[indices, None]
    return {
        "loss": ((X[indices] ** 2) * w).sum() / w.sum(),
        "gradient": (X[indices] * w).sum(0) / w.sum(),
    }


def evidence(
    found: Any,
    *,
    weights: np.ndarray | None = None,
    of: Callable[[np.ndarray, np.ndarray], Leaves] = weighted_mean,
    **more: Any,
) -> Evidence:
    """`found(on_rows)` makes the wrong results."""
    weigh = np.ones(ROWS) if weights is None else weights

    def on_rows(indices: np.ndarray) -> Leaves:
        return of(indices, weigh)

    expected = on_rows(np.arange(ROWS))
    limits = {path: np.full(np.shape(value), 1e-9) for path, value in expected.items()}
    usual = {"rows": ROWS, "replicas": N, "weights": weights, "on_rows": on_rows}
    return Evidence(found(on_rows), expected, limits, **{**usual, **more})


def everything(on_rows: Any) -> Leaves:
    return on_rows(np.arange(ROWS))


def block(replica: int) -> np.ndarray:
    return np.arange(ROWS).reshape(N, -1)[replica]


def times(factor: float) -> Any:
    def found(on_rows: Any) -> Leaves:
        results = everything(on_rows)
        return {**results, "gradient": results["gradient"] * factor}

    return found


def mean(parts: list[Leaves]) -> Leaves:
    return {path: np.mean([part[path] for part in parts], axis=0) for path in parts[0]}


def test_what_agrees_has_no_cause() -> None:
    assert likely_cause(evidence(everything)) == ""


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (N, ["exactly 4 times", "over 4 replicas", "pmean"]),
        (1 / N, ["1/4 of", "4 replicas twice"]),
        (3, ["exactly 3 times", "3 micro-batches"]),
        (1 / 3, ["1/3 of", "3 micro-batches twice"]),
        (3 * N, ["exactly 12 times", "4 replicas and 3 micro-batches"]),
        (N * N, ["exactly 16 times", "twice"]),
        (ROWS, ["exactly 32 times", "by 32"]),
        (ROWS / N, ["exactly 8 times", "over 4 replicas"]),
    ],
)
def test_factors(factor: float, words: list[str]) -> None:
    cause = likely_cause(evidence(times(factor), micro_batches=3))
    assert cause.startswith("gradient: ")
    for each in words:
        assert each in cause


def test_a_factor_of_as_many_replicas_as_micro_batches_may_be_either() -> None:
    cause = likely_cause(evidence(times(N), micro_batches=N))
    assert "summed over 4 replicas" in cause
    assert_mentions(cause, "4 micro-batches were", "added")


def test_what_explains_a_difference_explains_most_of_it() -> None:
    given = evidence(times(0.5))
    half = given.found["gradient"]
    near = [half * (1 + 1e-12), half * 1.6, half * np.nan]
    assert [given.explained("gradient", given.found, {"gradient": each}) for each in near] == [
        *(True, False, False)
    ]
    counted = dataclasses.replace(given, expected={"step": np.array(30_000)})
    steps = [{"step": np.array(each)} for each in (20_000, 20_001)]
    assert [counted.explained("step", steps[0], each) for each in steps] == [True, False]


def test_a_factor_that_a_second_moment_squares() -> None:
    def moments(indices: np.ndarray, weights: np.ndarray) -> Leaves:
        gradient = weighted_mean(indices, weights)["gradient"]
        return {"mu": gradient * 0.1, "nu": gradient**2 * 0.001}

    def found(on_rows: Any) -> Leaves:
        results = everything(on_rows)
        return {"mu": results["mu"] * N, "nu": results["nu"] * N * N}

    cause = likely_cause(evidence(found, of=moments))
    assert re.search(r"^mu: exactly 4 times .*\(nu: .*square\)", cause)


def test_a_factor_beside_weight_decay() -> None:
    """It multiplies the gradient, and not the decay."""
    values = np.random.default_rng(3).standard_normal((6, 5))
    slope = np.random.default_rng(4).standard_normal((6, 5))

    def decayed(indices: np.ndarray, weights: np.ndarray) -> Leaves:
        return {"w": -0.1 * slope - 0.05 * values}

    given = evidence(lambda _: {"w": -0.1 * N * slope - 0.05 * values}, of=decayed)
    assert likely_cause(given).startswith(NO_CAUSE)
    given = dataclasses.replace(given, values={"w": values})
    assert "exactly 4 times" in likely_cause(given)


def test_a_sum_that_is_divided_by_padding_too() -> None:
    weight = UNEQUAL.sum()
    cause = likely_cause(evidence(times(weight / ROWS), weights=UNEQUAL))
    assert_mentions(cause, f"all {ROWS} rows", "weight 0")


@pytest.mark.promise("verify.mistakes-are-named")
def test_a_mean_of_means() -> None:
    found = lambda on_rows: mean([on_rows(block(replica)) for replica in range(N)])  # noqa: E731
    cause = likely_cause(evidence(found, weights=UNEQUAL))
    assert_mentions(cause, "a mean", "of means")
    assert "from 2 to 8" in cause


def test_rows_that_depend_on_one_another() -> None:
    def normed(indices: np.ndarray, weights: np.ndarray) -> Leaves:
        rows = X[indices] - X[indices].mean(0)
        return {"loss": (rows**2).mean(), "gradient": rows.std(0)}

    found = lambda on_rows: mean([on_rows(block(replica)) for replica in range(N)])  # noqa: E731
    assert_mentions(likely_cause(evidence(found, of=normed)), "depend on", "BatchNorm")


def test_what_comes_before_the_reduction_and_is_not_linear() -> None:
    def clipped(indices: np.ndarray, weights: np.ndarray) -> Leaves:
        results = weighted_mean(indices, weights)
        norm = np.linalg.norm(results["gradient"])
        return {**results, "gradient": results["gradient"] * min(1, 0.2 / norm)}

    found = lambda on_rows: mean([on_rows(block(replica)) for replica in range(N)])  # noqa: E731
    cause = likely_cause(evidence(found, of=clipped))
    assert_mentions(cause, "loss agrees", "the reduction", "clip")


def test_replicas_that_hold_their_own_rows() -> None:
    given = evidence(lambda on_rows: on_rows(block(0)))
    given = dataclasses.replace(given, of_replica=lambda replica: given.on_rows(block(replica)))
    assert_mentions(likely_cause(given), "each replica", "own rows", "never reduced", "lax.pmean")


def test_one_replica_that_strays() -> None:
    given = evidence(everything)

    def held(replica: int) -> Leaves:
        off = 0.1 if replica == 2 else 0
        return {path: value + off for path, value in given.expected.items()}

    cause = likely_cause(dataclasses.replace(given, of_replica=held))
    assert_mentions(cause, "differs on", "replica 2 only")


def test_replicas_at_scales_of_their_own() -> None:
    given = evidence(everything)
    given = dataclasses.replace(
        given,
        of_replica=lambda replica: {
            **given.expected,
            "gradient": given.expected["gradient"] * (1 + replica),
        },
    )
    assert "1, 2, 3, 4 times" in likely_cause(given)


def test_replicas_that_differ_for_no_known_reason() -> None:
    given = evidence(everything)
    noise = np.random.default_rng(1).standard_normal((N, 5))
    given = dataclasses.replace(
        given, of_replica=lambda replica: {**given.expected, "gradient": noise[replica]}
    )
    assert_mentions(likely_cause(given), "not the", "all replicas", "axis_index")


@pytest.mark.parametrize(("side", "part"), [("last", slice(0, 30)), ("first", slice(2, 32))])
def test_rows_that_were_dropped(side: str, part: slice) -> None:
    """32 rows over 6 replicas."""
    cause = likely_cause(evidence(lambda on_rows: on_rows(np.arange(ROWS)[part]), replicas=6))
    assert_mentions(cause, f"the {side} 2 of 32 rows", "were dropped")


@pytest.mark.parametrize("layout", ["runs of a replica", "every other row", "runs of the batch"])
@pytest.mark.parametrize("which", ["first", "last"])
def test_only_one_micro_batch(layout: str, which: str) -> None:
    index = np.arange(ROWS)
    cut = {
        "runs of a replica": index.reshape(N, 2, -1).swapaxes(0, 1),
        "every other row": index.reshape(N, -1, 2).transpose(2, 0, 1),
        "runs of the batch": index.reshape(2, N, -1),
    }[layout]
    part = cut[-1 if which == "last" else 0].ravel()
    cause = likely_cause(evidence(lambda on_rows: on_rows(part), micro_batches=2))
    assert f"only the {which} of 2 micro-batches" in cause


def test_means_of_micro_batches() -> None:
    parts = np.arange(ROWS).reshape(N * 2, -1)
    weights = np.random.default_rng(2).uniform(0, 1, ROWS)
    found = lambda on_rows: mean([on_rows(part) for part in parts])  # noqa: E731
    cause = likely_cause(evidence(found, weights=weights, micro_batches=2))
    assert "4 replicas and 2 micro-batches" in cause


def test_nan_of_a_replica_without_weight() -> None:
    weights = np.where(np.arange(ROWS) < 24, 1.0, 0.0)
    found = lambda on_rows: {path: value * np.nan for path, value in everything(on_rows).items()}  # noqa: E731
    cause = likely_cause(evidence(found, weights=weights))
    assert_mentions(cause, "replica 3", "0 by 0")


def test_hypotheses_of_the_caller_come_first() -> None:
    text = "the moon is full"
    odd = Hypothesis(text, lambda: {"loss": np.array(0.0), "gradient": X[0]})
    found = lambda on_rows: {"loss": np.array(0.0), "gradient": X[0]}  # noqa: E731
    assert likely_cause(evidence(found, others=[odd])) == text


def test_two_causes_are_both_named() -> None:
    def found(on_rows: Any) -> Leaves:
        return {
            "loss": on_rows(block(0))["loss"],
            "gradient": mean([on_rows(block(replica)) for replica in range(N)])["gradient"],
        }

    cause = likely_cause(evidence(found, weights=UNEQUAL))
    assert re.search(r"gradient: .*a mean\b.*of means", cause)
    assert re.search("loss: .*rows of .* 0 alone", cause)
