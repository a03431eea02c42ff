"""Pipeline schedules: when the last stage begins its backward passes."""

from collections.abc import Callable
from typing import Literal

ScheduleName = Literal["1f1b", "gpipe"]
"""The names of `SCHEDULES`, for type checkers and editors."""

SCHEDULES: dict[str, Callable[[int, int], int]] = {
    "1f1b": lambda stages, _: stages - 1,
    "gpipe": lambda stages, micro_batches: stages - 1 + micro_batches,
}
"""Name -> `(stages, micro_batches)` -> tick of the last stage's first backward pass: for `1f1b`
the tick of its first forward pass, so that no stage keeps more than 2 x stages - 1 micro-batches;
for `gpipe` the tick after all its forward passes."""


def bubble(stages: int, micro_batches: int) -> float:
    """Return the pipeline bubble: the fraction of a step in which a stage is idle."""
    return (stages - 1) / (micro_batches + stages - 1)
