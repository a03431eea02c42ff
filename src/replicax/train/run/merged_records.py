"""Metrics that are no means in records: merged over the steps, or of the last one."""

from typing import Any

from replicax.core.data.merged import Merged, Merging, named_values
from replicax.errors import LossError


class MergedOfSteps:
    """The metrics that are no means of the steps since the last record.

    A metric that grows with the rows is that of the last step: all rows of an interval would have
    to be kept, and to be in every checkpoint.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """Continue after `save_state` returned `state`."""
        self._saved = dict(state or {})
        self._merging: dict[str, Merging] = {}

    def add(self, name: str, metric: Merged) -> None:
        """Merge the metric of a finished step."""
        if metric.grows:
            self._merging[name] = Merging()
        elif name in self._saved:
            self._merging[name] = Merging.resumed(self._saved.pop(name), metric)
        self._merging.setdefault(name, Merging()).add(metric)

    def values(self) -> dict[str, float]:
        """Return the numbers of each metric."""
        found: dict[str, float] = {}
        for name, merging in self._merging.items():
            found |= recorded(named_values(name, merging.compute()))
        return found

    def save_state(self) -> dict[str, Any]:
        """Return, as JSON values, what the next record needs from the steps so far."""
        told = {n: each.save_state() for n, each in self._merging.items() if not each.grows}
        return self._saved | told


def recorded(values: dict[str, Any]) -> dict[str, float]:
    """Return `values`; `LossError` if one is no number, which a record cannot have."""
    for name, value in values.items():
        if not isinstance(value, int | float):
            shape = f"an array {list(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise LossError(
                f"the metric {name!r} computes {shape}, and the records of a run have numbers: "
                "return a number or a dict of numbers, or evaluate it with dp.evaluate"
            )
    return values
