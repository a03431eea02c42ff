"""Text tables: lines keep to their columns."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.figures import figures

from replicax.text.table import WIDTH, aligned, columns, fold_lines, for_stream, labelled

NAME = "a/path/that/can-be-copied-20261125-194006.json"


@given(st.text("xy ", max_size=200), st.text("xy ", max_size=200))
def test_a_long_name_or_text_goes_into_more_lines(name: str, beside: str) -> None:
    drawn = columns("word", [("head", "1", ""), (name, "12 GB", beside)])
    assert max(map(len, drawn)) <= WIDTH
    assert drawn[0].startswith("word   head")
    kept = "".join("".join(drawn[1:]).split())
    assert "".join(name.split()) + "12GB" + "".join(beside.split()) == kept


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "see    runs/a-b-c/ (config.json, curves.png)",
            ["see    runs/a-b-c/", "       (config.json,", "       curves.png)"],
        ),
        (
            "  evaluate RUN [FLAGS]   loss of a run's model",
            ["  evaluate RUN [FLAGS]", "      loss of a run's", "      model"],
        ),
        (f"replicax: {NAME} is gone", ["replicax:", f"  {NAME}", "  is gone"]),
        ("\x1b[1mshort\x1b[0m in color", ["\x1b[1mshort\x1b[0m in color"]),
    ],
)
def test_long_lines_are_broken_at_words_below_their_text(line: str, parts: list[str]) -> None:
    assert fold_lines(line, 24).split("\n") == parts
    assert for_stream(line, io.StringIO()) == line  # not of a terminal


def test_in_a_narrow_terminal_names_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = labelled("note", f"see {NAME} of the first start")
    rows = [("head", "takes", ""), (NAME, "12 GB", "it moves")]
    table = aligned([["name", "rows per\nsecond", "peak"], [NAME, "1,500", "3.5 GB"]])
    for lines in (text, columns("change", rows), table):
        assert any(line.strip() == NAME for line in lines)
        assert all(len(line) <= 40 or line.strip() == NAME for line in lines)
    assert [figures(line) for line in table[1:]] == [["1,500", "3.5"]]
