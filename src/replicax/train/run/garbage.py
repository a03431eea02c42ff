"""Python's long garbage collections, in all processes of a job at the same steps.

A full collection looks at all objects of a process: a second where there are millions. Where each
process does it when its own counts say so, one pause after another holds up all. Those of young
objects stay Python's own: they are short, and memory would grow without them.
"""

import contextlib
import gc
from collections.abc import Iterator

COLLECTED_EVERY = 100
"""Steps from one full collection to the next."""
_NEVER = 2**31 - 1


class Garbage:
    """Collects at agreed steps, once `begun`; one process, or one without `gc`, is left alone."""

    def __init__(self, processes: int) -> None:
        self._wanted, self._step = processes > 1, 0
        self._thresholds: tuple[int, int, int] | None = None  # Python's own, while this is on

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let Python collect by itself again at the end of the context."""
        try:
            yield
        finally:
            if self._thresholds is not None:
                gc.set_threshold(*self._thresholds)
                gc.unfreeze()
                self._thresholds = None

    def begun(self, step: int) -> None:
        """Take over: leave out what exists by now, programs and modules, from later collections."""
        self._step = step
        if self._wanted and gc.isenabled():
            self._thresholds = gc.get_threshold()
            gc.set_threshold(*self._thresholds[:2], _NEVER)
            gc.collect()
            gc.freeze()

    def stepped(self, step: int) -> None:
        """Collect if a multiple of `COLLECTED_EVERY` was passed."""
        before, self._step = self._step, step
        if self._thresholds is not None and before // COLLECTED_EVERY < step // COLLECTED_EVERY:
            gc.collect()
