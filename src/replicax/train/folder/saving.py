"""When a run saves checkpoints, and which of them it keeps."""

import dataclasses

from replicax.text.arguments import Count, Positive, typed


@typed
@dataclasses.dataclass(frozen=True)
class Saving:
    """When to save checkpoints of a run, and which ones to keep.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=9, run_dir="runs/x",
        ...        saving=rx.Saving(every=1000, keep=2))

    Args:
        every: steps between two checkpoints; None to use `minutes`.
        minutes: minutes between two checkpoints if `every` is None, but the first of a start comes
            after one; None for no checkpoints.
        keep: number of newest checkpoints to keep.
        keep_every: also keep the checkpoints of every multiple of this step; None for none.

    Raises:
        ConfigError: a number is not above 0.
    """

    every: Count | None = None
    minutes: Positive | None = 10.0
    keep: Count = 3
    keep_every: Count | None = None

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are saved at all."""
        return self.every is not None or self.minutes is not None

    @property
    def clock_seconds(self) -> float | None:
        """Seconds between two checkpoints if saving goes by time, else None."""
        return 60 * self.minutes if self.every is None and self.minutes is not None else None
