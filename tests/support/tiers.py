"""Which cases `make test` runs, and which it leaves to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive


def only(kept: Iterable[Any], cases: Iterable[Any], sampled: Iterable[Any] | None = None) -> Any:
    """Return `cases` for `parametrize`; those that are not `kept` are exhaustive.

    `make test-all` runs the `sampled` of these, or all; `make test-everything` the others too.
    """
    chosen, every = list(kept), list(cases)
    of_all = every if sampled is None else [*sampled]
    assert all(case in every for case in chosen), "what is kept is no case"
    return [
        case if case in chosen else exhaustive(case) if case in of_all else _everything(case)
        for case in every
    ]


def exhaustive(case: Any, **more: Any) -> Any:
    """Return a case of `parametrize` that is exhaustive; a tuple has a value for each name."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=EXHAUSTIVE, **more)


def _everything(case: Any) -> Any:
    marks = (EXHAUSTIVE, pytest.mark.everything)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
