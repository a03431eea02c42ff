"""The figures behind pictures, and what pictures of the docs need."""

from typing import Any

import pytest
from matplotlib.figure import Figure


def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the list that every figure joins when it is saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def joined(self: Figure, *args: Any, **options: Any) -> None:
        saved.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", joined)
    return saved
