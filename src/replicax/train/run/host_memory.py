"""The host's memory in a run: reused between steps, and cleared of garbage at agreed steps."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

# From malloc.h of glibc.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
COLLECTED_EVERY = 100
"""Steps from one full garbage collection to the next."""
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; return whether this succeeded.

    XLA's CPU backend allocates temporary memory anew in every step. Above 32 MiB glibc gets it
    from the system, page by page, and returns it after the step: LeNet at batch size 256 on one
    device then takes 32 ms per step instead of 17. The cost: the process stays at its peak memory.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28}
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted.items())


class Garbage:
    """Python's long garbage collections, in all processes of a job at the same steps.

    A full collection looks at all objects of a process: a second where there are millions. Where
    each process does it when its own counts say so, one pause after another holds up all. Those of
    young objects stay Python's own: they are short, and memory would grow without them. One
    process alone, or one that does not collect, is left as it is.
    """

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
