"""Every promise of the pages has a test that would fail without it."""

import re

from support.promises import PAGE, ROW, TESTS, marked_tests, written

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = ROW.findall(TEXT)


def test_the_table_names_the_tests_that_are_marked() -> None:
    assert written(TEXT) == TEXT, "run python tests/support/promises.py --write"
    assert len(ROWS) == TEXT.count("\n| `") == len({promise for promise, _, _ in ROWS})


def test_each_promise_has_a_test_and_each_mark_a_promise() -> None:
    assert {promise for promise, _, _ in ROWS} == set(marked_tests())


def test_a_promise_is_one_short_sentence_of_a_page_that_exists() -> None:
    for promise, sentence, link in ROWS:
        assert len(sentence) <= 90, promise
        assert (PAGE.parent / link).is_file(), promise


def test_each_test_that_a_page_names_exists() -> None:
    for page in (TESTS.parent / "README.md", *PAGE.parent.glob("*.md")):
        for name in re.findall(r"`(?:tests/)?([\w/]+\.py::\w+)`", page.read_text("utf-8")):
            path, _, function = name.partition("::")
            assert f"\ndef {function}(" in (TESTS / path).read_text("utf-8"), (page.name, name)
