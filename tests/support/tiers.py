"""Which cases `make test` runs, and which it leaves to `make test-all`."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive
NONE: Mapping[Any, str] = MappingProxyType({})


def only(kept: Iterable[Any], cases: Iterable[Any], pending: Mapping[Any, str] = NONE) -> list[Any]:
    """Return `cases` for `parametrize`; those that are not `kept` are exhaustive.

    Those that are `pending` fail as yet, for that reason.
    """
    chosen, listed, waiting = list(kept), list(cases), list(pending)
    assert all(case in listed for case in chosen), "what is kept is no case"
    made = [case if case in chosen else exhaustive(case) for case in listed if case not in waiting]
    return made + [
        exhaustive(case, extra=pytest.mark.xfail(reason=pending[case], strict=True))
        for case in listed
        if case in waiting
    ]


def exhaustive(case: Any, *, extra: Any = (), **more: Any) -> Any:
    """Return a case of `parametrize` that is exhaustive; a tuple has a value for each name."""
    return pytest.param(
        *(case if isinstance(case, tuple) else (case,)),
        marks=[EXHAUSTIVE, *([extra] if extra else [])],
        **more,
    )
