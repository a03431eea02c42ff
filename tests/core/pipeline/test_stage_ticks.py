"""The tables in the docstring of `stage_ticks`: which pass a stage computes in which tick."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax import lax
from support.staged import step_sums

from replicax.core.pipeline import stage_ticks

TABLES = {
    "1f1b": ["F0 | F1    | F2 B0 | B1    | B2", "   | F0 B0 | F1 B1 | F2 B2 |   "],
    "gpipe": ["F0 | F1 | F2 |    |    | B0 | B1 | B2", "   | F0 | F1 | F2 | B0 | B1 | B2 |   "],
}


def passes(table: list[str]) -> set[tuple[int, int, str]]:
    """Stage, tick and pass of each entry."""
    return {
        (stage, tick, entry)
        for stage, row in enumerate(table)
        for tick, cell in enumerate(row.split("|"))
        for entry in cell.split()
    }


@pytest.mark.parametrize("schedule", TABLES)
def test_passes_by_tick(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[tuple[int, int, str]] = set()
    slots: list[int] = []
    now: dict[str, Any] = {}
    has = stage_ticks.Stage._has

    def noted_scan(tick: Any, first: Any, ticks: Any) -> Any:
        slots.append(jax.tree.leaves(first[2])[0].shape[0])

        def noted_tick(carried: Any, time: Any) -> Any:
            now.update(time=time, kinds=iter("FB"))  # each tick asks for these, in this order
            return tick(carried, time)

        return lax.scan(noted_tick, first, ticks)

    def noted_has(stage: Any, number: Any) -> Any:
        there, kind = has(stage, number), next(now["kinds"])

        def note(stage: Any, time: Any, number: Any, there: Any) -> None:
            if there:
                found.add((int(stage), int(time), f"{kind}{int(number)}"))

        jax.debug.callback(note, stage.index, now["time"], number, there)
        return there

    monkeypatch.setattr(stage_ticks, "lax", SimpleNamespace(**{**vars(lax), "scan": noted_scan}))
    monkeypatch.setattr(stage_ticks.Stage, "_has", noted_has)
    step_sums(schedule=schedule, data=1, stage=2, micro_batches=3)
    jax.effects_barrier()
    assert found == passes(TABLES[schedule])
    assert set(slots) == {3}
