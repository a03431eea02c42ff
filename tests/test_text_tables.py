"""Text tables: lines keep to their columns."""

from hypothesis import given
from hypothesis import strategies as st

from replicax.table import MARGIN, WIDTH, columns, labelled


@given(st.text("ab 1", max_size=300), st.sampled_from(["", "fits", "target"]))
def test_a_text_keeps_to_its_margin(text: str, word: str) -> None:
    for number, each in enumerate(labelled(word, text)):
        assert len(each) <= WIDTH
        assert each[:MARGIN] == ("" if number else word).ljust(MARGIN)


def test_figures_stand_below_each_other() -> None:
    assert columns("change", [("with", "takes", ""), ("layout=fsdp", "9 GB", "it moves")]) == [
        "change with         takes",
        "       layout=fsdp   9 GB  it moves",
    ]


@given(st.text("xy ", max_size=200), st.text("xy ", max_size=200))
def test_a_long_name_or_text_goes_into_more_lines(name: str, beside: str) -> None:
    drawn = columns("word", [("head", "1", ""), (name, "12 GB", beside)])
    assert max(map(len, drawn)) <= WIDTH
    assert drawn[0].startswith("word   head")
    kept = "".join("".join(drawn[1:]).split())
    assert "".join(name.split()) + "12GB" + "".join(beside.split()) == kept
