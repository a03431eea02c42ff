"""Steps that mix rows give the numbers of one device, or are refused."""

import random
from dataclasses import replace

import pytest
from row_draws import drawn
from row_programs import FULL, SHORT, Case, Program
from row_verdict import differs, verdict
from support.tiers import only

DIVIDED = [("shard_map", 1), ("jit", 2), ("exact", 1), ("pmap", 1)]

MIXING = {
    "advantages in the body": Program((("always", "std"),), before=1),
    "mixup in the body": Program((("always", "roll"),), before=1),
    "ranks in the body": Program((("always", "ranks"),), before=1),
    "their number in the body": Program((("always", "by their number"),), before=1),
    "a mean in a closure": Program((("always", "mean"),), before=1, closure=True),
    "a term that a schedule starts": Program((("warm-up", "contrast"),)),
    "a term in one of five steps": Program((("every fifth", "contrast"),)),
    "a term with a weight in rx.Replicated": Program((("weight", "contrast"),)),
    "a term behind a gate": Program((("gate", "contrast"),)),
    "only in training": Program((("in training", "contrast"),)),
    "nothing masked in the first batch": Program((("always", "masked mean"),)),
    "with draws": Program((("always", "drawn"), ("always", "contrast"))),
    "in a loop, late": Program((("late in a loop", "softmax of rows"),)),
    "shuffled": Program((("always", "shuffled"),)),
    "a sum": Program((), "sum"),
    "a root": Program((), "root"),
    "a weighted mean": Program((), "weighted mean"),
    "the largest": Program((), metrics="largest"),
    "a spread": Program((), metrics="spread"),
    "a count": Program((), metrics="count"),
}
APART = {
    "flipped and back": Program((("always", "flipped and back"),)),
    "a loop for each row": Program((("always", "while"),)),
    "draws of each row": Program((("always", "drawn for each"),), "mean", "accuracy"),
    "own entry": Program((("late", "own entry"),), "weighted"),
    "in the body": Program((("always", "inverse"), ("gate", "scan")), before=1, updates=2),
}
FIRST = [name for name in MIXING if name.startswith(("a", "in"))]


SIZES = {16: FULL, 12: (12, 12)}


def agrees(program: Program, case: Case) -> bool:
    """Whether a program is accepted, and has the numbers of one device."""
    found, why = program.found(case)
    return not why and differs(found, program.plain()) < 1e-5


@pytest.mark.promise("rows.refused-not-averaged")
@pytest.mark.parametrize(("mode", "parts"), only(DIVIDED[:1], DIVIDED))
@pytest.mark.parametrize("name", MIXING)
def test_it_is_refused_where_some_rows_are_seen(name: str, mode: str, parts: int) -> None:
    program, case = MIXING[name], Case(mode, parts)
    if (mode, parts) == ("jit", 2) and program.own and not program.closure:
        assert agrees(program, case)
    else:
        found, why = program.found(case)
        assert why
        assert not found
        assert "\n" not in why


@pytest.mark.promise("rows.refused-not-averaged")
@pytest.mark.parametrize("name", only(["mixup in the body", "a term behind a gate"], MIXING))
def test_it_is_refused_with_padding(name: str) -> None:
    assert replace(MIXING[name], rows=(SHORT,)).found(Case("jit"))[1]


@pytest.mark.parametrize("rows", [16, 12])
@pytest.mark.parametrize("name", only(["mixup in the body", "only in training"], MIXING))
def test_it_is_that_of_one_device_where_all_rows_are_seen(name: str, rows: int) -> None:
    assert agrees(replace(MIXING[name], rows=SIZES[rows]), Case("jit"))


@pytest.mark.parametrize(("mode", "parts"), only(DIVIDED[:1], DIVIDED))
@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_accepted(name: str, mode: str, parts: int) -> None:
    assert agrees(APART[name], Case(mode, parts))


@pytest.mark.parametrize("seed", only(range(4), range(24)))
def test_drawn_programs(seed: int) -> None:
    program = drawn(seed)
    plain = program.plain()
    for case in program.cases(random.Random(seed), 2):
        found, why = program.found(case)
        assert not (why and program.kind == "apart")
        assert verdict(program, case, found, plain).kind != "silent"
