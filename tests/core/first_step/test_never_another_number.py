"""Steps that mix rows give the numbers of one device, or are refused."""

import pytest
from row_programs import ROWS, SHORT, Program, differs
from support.tiers import only

DIVIDED = [("shard_map", 1), ("jit", 2), ("exact", 1), ("pmap", 1)]

MIXING = {
    "advantages in the body": Program([("always", "std")], before=1),
    "mixup in the body": Program([("always", "roll")], before=1),
    "ranks in the body": Program([("always", "ranks")], before=1),
    "their number in the body": Program([("always", "by their number")], before=1),
    "a mean in a closure": Program([("always", "mean")], before=1, closure=True),
    "a term that a schedule starts": Program([("warm-up", "contrast")]),
    "a term in one of five steps": Program([("every fifth", "contrast")]),
    "a term with a weight in rx.Shared": Program([("weight", "contrast")]),
    "a term behind a gate": Program([("gate", "contrast")]),
    "only in training": Program([("in training", "contrast")]),
    "nothing masked in the first batch": Program([("always", "masked mean")]),
    "with draws": Program([("always", "drawn"), ("always", "contrast")]),
    "in a loop, late": Program([("late in a loop", "softmax of rows")]),
    "shuffled": Program([("always", "shuffled")]),
    "a sum": Program([], "sum"),
    "a root": Program([], "root"),
    "a weighted mean": Program([], "weighted mean"),
    "the largest": Program([], metrics="largest"),
    "a spread": Program([], metrics="spread"),
    "a count": Program([], metrics="count"),
}
APART = {
    "flipped and back": Program([("always", "flipped and back")]),
    "a loop for each row": Program([("always", "while")]),
    "draws of each row": Program([("always", "drawn for each")], "mean", "accuracy"),
    "own entry": Program([("late", "own entry")], "weighted"),
    "in the body": Program([("always", "inverse"), ("gate", "scan")], before=1, updates=2),
}
FIRST = [name for name in MIXING if name.startswith(("a", "in"))]


@pytest.mark.promise("rows.refused-not-averaged")
@pytest.mark.parametrize(("mode", "parts"), only(DIVIDED[:1], DIVIDED))
@pytest.mark.parametrize("name", MIXING)
def test_it_is_refused_where_some_rows_are_seen(name: str, mode: str, parts: int) -> None:
    program = MIXING[name]
    found = program.found(mode, parts, ROWS)
    if (mode, parts) == ("jit", 2) and program.own and not program.closure:
        assert differs(found, program.plain(ROWS)) < 1e-5  # type: ignore[arg-type]
    else:
        assert isinstance(found, str)
        assert "\n" not in found


@pytest.mark.promise("rows.refused-not-averaged")
@pytest.mark.parametrize("name", only(["mixup in the body", "a term behind a gate"], MIXING))
def test_it_is_refused_with_padding(name: str) -> None:
    assert isinstance(MIXING[name].found("jit", 1, SHORT), str)


@pytest.mark.parametrize("rows", [ROWS, 12])
@pytest.mark.parametrize("name", only(["mixup in the body", "only in training"], MIXING))
def test_it_is_that_of_one_device_where_all_rows_are_seen(name: str, rows: int) -> None:
    program = MIXING[name]
    assert differs(program.found("jit", 1, rows), program.plain(rows)) < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "parts"), only(DIVIDED[:1], DIVIDED))
@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_accepted(name: str, mode: str, parts: int) -> None:
    program = APART[name]
    assert differs(program.found(mode, parts, ROWS), program.plain(ROWS)) < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", only(range(4), range(24)))
def test_drawn_programs(seed: int) -> None:
    program = Program.drawn(seed)
    for mode, rows in (("shard_map", ROWS), ("jit", SHORT)):
        found = program.found(mode, 1, rows)
        if isinstance(found, str):
            assert not program.apart or (rows == SHORT and "mean" in (program.end, program.metrics))
        else:
            assert differs(found, program.plain(rows)) < 3e-5
