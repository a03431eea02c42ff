"""Whether a failure is worth another start."""

import re
from collections import deque

from replicax.launch.cause import Failure

SAME_IN_A_ROW = 3
FIRST_SECONDS = 10.0
USAGE = 2
"""The exit code of a wrong flag or configuration."""
# What differs between two runs of one mistake: addresses, ids, ports, process ids, counts, times.
_INCIDENTAL = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+")


class Restarts:
    """Counts starts, and knows a crash loop.

    The same failure is the same process with the same words, numbers aside: three in a row at the
    same step, or within the first seconds of each start, mean that a restart will not help.
    """

    def __init__(self, restarts: int) -> None:
        self.left = restarts
        self._total = restarts
        self._last: deque[tuple[int, str, int | None, bool]] = deque(maxlen=SAME_IN_A_ROW)

    def refused(self, failure: Failure, seconds: float) -> str | None:
        """Why all is not started again after `failure`; None where it is.

        Args:
            failure: the first one of this start.
            seconds: that this start took.

        Returns:
            Empty where there is nothing to say: no restart was asked for.
        """
        words = _INCIDENTAL.sub("#", failure.cause)
        at_once = seconds < FIRST_SECONDS
        self._last.append((failure.process, words, failure.step, at_once))
        if self._total == 0:
            return ""
        if failure.exit_code == USAGE:
            return "exit code 2 is a wrong flag or configuration: a restart will not help"
        if self._in_a_loop():
            return f"the same failure {SAME_IN_A_ROW} times in a row: a restart will not help"
        return self._take()

    def refused_after_saving(self) -> str | None:
        """As `refused`, after a start that ended early with everything saved."""
        self._last.clear()
        return self._take() if self._total else ""

    @property
    def progress(self) -> str:
        """`restart 1 of 3`, of the start that comes now."""
        return f"restart {self._total - self.left} of {self._total}"

    def _take(self) -> str | None:
        if self.left == 0:
            return f"all {self._total} restarts are used up"
        self.left -= 1
        return None

    def _in_a_loop(self) -> bool:
        if len(self._last) < SAME_IN_A_ROW:
            return False
        if len({(process, words) for process, words, _, _ in self._last}) > 1:
            return False
        steps = {step for _, _, step, _ in self._last}
        same_step = len(steps) == 1 and None not in steps
        return same_step or all(at_once for _, _, _, at_once in self._last)
