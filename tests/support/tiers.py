"""Which cases `make test` runs, and which it leaves to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive


def only(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return `cases` for `parametrize`; those that are not `kept` are exhaustive."""
    chosen = list(kept)
    made = [case if case in chosen else exhaustive(case) for case in cases]
    assert all(case in made for case in chosen), "what is kept is no case"
    return made


def exhaustive(case: Any, **more: Any) -> Any:
    """Return a case of `parametrize` that is exhaustive; a tuple has a value for each name."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=EXHAUSTIVE, **more)
