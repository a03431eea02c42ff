"""The choice of the tests of `make test`: what it prefers, and the table that it writes."""

import test_choice
from test_choice import Case, Choice


def case(name: str, seconds: float, *places: int) -> Case:
    return Case(name, seconds, frozenset(places))


def test_places_are_reached_by_the_cheapest_tests() -> None:
    cases = [
        case("a.py::test_dear", 9.0, 1, 2, 3),
        case("a.py::test_cheap", 1.0, 1, 2),
        case("a.py::test_same[x]", 1.1, 1, 2),
        case("b.py::test_last", 3.0, 3),
    ]
    choice = Choice({each.name: each for each in cases})
    choice.cover("test", 1, 100.0)
    assert {*choice.chosen} == {"a.py::test_cheap", "b.py::test_last"}
    choice.cover("test-all", 2, 100.0)  # by tests of other names
    assert choice.chosen["a.py::test_same[x]"] == "test-all"
    assert choice.chosen["a.py::test_cheap"] == "test"
    assert choice.seconds == 1.0 + 3.0 + 1.1 + 9.0 + 2 * test_choice.FILE_SECONDS


def test_a_choice_ends_with_its_seconds() -> None:
    cases = [case(f"a.py::test_{n}", 1.0, n) for n in range(100)]
    choice = Choice({each.name: each for each in cases})
    choice.cover("test", 1, 10.0)
    assert len(choice.chosen) == 10


def test_the_table_names_functions_and_where_cases_differ_these() -> None:
    of = {"a": "test", "b": "everything", "c": "everything"}
    names = ["tests/r/t.py::test_one", *(f"tests/r/t.py::test_two[{each}]" for each in of)]
    names += ["tests/r/t.py::test_three[a]", "tests/r/s.py::test_four"]

    def tier(name: str) -> str:
        return of[name[-2]] if "[" in name else "test-all" if "four" in name else "test"

    assert test_choice.tiers(names, tier) == {
        "r/t.py": {"test_two": {"*": "everything", "[a]": "test"}},
        "r/s.py": {"test_four": "test-all"},
    }
