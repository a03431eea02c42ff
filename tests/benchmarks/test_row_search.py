"""benchmarks/rows.py: its reference is plain JAX, and its verdicts are by numbers."""

import random

import jax
import numpy as np
import pytest
from row_draws import drawn, smaller
from row_programs import SHORT, Case, Program
from row_verdict import gaps, verdict

import replicax as rx

STATED = Program(
    (("always", "largest real"), ("always", "memory")),
    "weighted by hand",
    before=2,
    rows=(SHORT,),
    memory=SHORT,
)
WORDS = ("gather", "row_weights", "Weighted", "value_and_grad", "step_number", "mean")


def test_the_reference_uses_nothing_of_replicax(monkeypatch: pytest.MonkeyPatch) -> None:
    found, why = STATED.found(Case("jit", 1, 2))
    for word in WORDS:
        monkeypatch.delattr(rx, word)
    [plain] = STATED.plain()
    assert not why
    assert plain.keys() == found[0].keys() >= {"loss", "gradient.w", "memory"}
    assert max((gap for gap, _, _ in gaps(found, [plain])), default=0) < 1e-5


def test_the_second_opinion_is_in_float64_on_the_same_numbers() -> None:
    program = Program((("always", "dense"),), rows=(4,), numbers="larger")
    wide = program.at("float64")
    assert wide.batch(0, 4)["x"].dtype == wide.model(1)["w"].dtype == np.float64
    assert np.array_equal(wide.batch(0, 4)["x"], program.batch(0, 4)["x"])
    [exact], [rounded] = wide.plain(), program.plain()
    assert 1e-9 < abs(exact["loss"] / rounded["loss"] - 1) < 1e-6
    assert not jax.config.jax_enable_x64


LEAF = {"loss": np.float64(2), "gradient.w": np.ones(2), "gradient.gate": np.float64(1e-4)}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("gradient.gate", 1.1e-4, 0.1),  # relative to its own size
        ("loss", np.nan, np.inf),
        ("gradient.w", np.array([1, np.nan]), np.inf),
    ],
)
def test_differences_are_relative_to_the_size_of_each(
    name: str, value: float, expected: float
) -> None:
    [(gap, step, where)] = gaps([LEAF, {**LEAF, name: np.asarray(value)}], [LEAF, LEAF])
    assert (step, where) == (1, name)
    assert gap == pytest.approx(expected)


def test_numbers_that_are_not_finite_on_one_device_are_not_compared() -> None:
    assert not [*gaps([LEAF], [{**LEAF, "loss": np.float64(np.inf)}])]


def test_a_wrong_gradient_is_silent_and_its_rounding_is_not() -> None:
    program, case = Program((("always", "dense"),), rows=(4,)), Case("jit", 1, 1)
    plain, off = program.plain(), [{**step} for step in program.plain()]
    off[0]["gradient.w"] = off[0]["gradient.w"] * 1.0001

    class Wrong(Program):
        def found(self, case: Case) -> tuple[list[dict[str, np.ndarray]], str]:
            return [{n: v * 1.0001 for n, v in step.items()} for step in self.plain()], ""

    assert verdict(program, case, plain, plain).kind == "same"
    assert verdict(program, case, off, plain).kind == "rounding"  # in float64 it is right
    assert verdict(Wrong(program.parts, rows=(4,)), case, off, plain).kind == "silent"


def test_programs_are_drawn_of_all_kinds_and_get_smaller() -> None:
    programs = [drawn(seed) for seed in range(300)]
    assert drawn(7) == drawn(7)
    assert {each.kind for each in programs} == {"apart", "careful", "mixed", "curved"}
    assert {each.dtype for each in programs} == {"float32", "bfloat16", "float16", "float64"}
    assert any((each.memory or 16) < 16 for each in programs)
    assert any(each.draws for each in programs)
    assert all(case.accumulate == 1 for p in programs if p.draws for case in p.cases(random, 9))
    assert all(each != program for program in programs[:20] for each in smaller(program))
