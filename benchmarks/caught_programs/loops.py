"""Loops around the step, which only their source text shows."""

from typing import Any

import numpy as np
from caught_programs.parts import Loop


class ShortLastBatch(Loop):
    """The mean of the losses of batches, of which the last one is short"""

    project, number = "seen in use", ""

    @staticmethod
    def broken(evaluate: Any, state: Any, rows: Any, size: int) -> Any:
        losses = []
        for start in range(0, len(rows), size):
            losses.append(evaluate(state, rows[start : start + size]))
        return np.mean(losses)

    @staticmethod
    def mended(evaluate: Any, state: Any, rows: Any, size: int) -> Any:
        losses, counts = [], []
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            losses.append(evaluate(state, batch))
            counts.append(len(batch))
        return np.average(losses, weights=counts)
