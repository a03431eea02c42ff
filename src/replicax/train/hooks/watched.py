"""A metric of the evaluations that a hook watches, and which of two values is better."""

import dataclasses
import math

from replicax.errors import ConfigError, choose
from replicax.train.records import Record

_LESS_IS_BETTER = ("loss", "error", "perplexity", "bits_per_byte")
"""Names of metrics end in one of these."""

_MODES = {"min": "lowest", "max": "highest"}


@dataclasses.dataclass(frozen=True)
class Watched:
    """A metric, and its best value so far.

    Args:
        hook: that watches it, for messages.
        metric: its name in the records of evaluations.
        mode: whether the best is the `min` or the `max`; by default `min` of a loss, an error, a
            perplexity and bits per byte, and else `max`.
        best: so far.
        step: of the best.
        since: evaluations after it.

    Raises:
        ConfigError: another mode.
    """

    hook: str
    metric: str
    mode: str | None
    best: float | None = None
    step: int = 0
    since: int = 0

    def __post_init__(self) -> None:
        if self.mode is None:
            less = self.metric.endswith(_LESS_IS_BETTER)
            object.__setattr__(self, "mode", "min" if less else "max")
        choose(f"{self.hook} with mode", self.mode, _MODES)

    @property
    def title(self) -> str:
        """`the lowest loss`."""
        return f"the {_MODES[str(self.mode)]} {self.metric}"

    def after(self, record: Record, least: float = 0.0) -> "Watched":
        """Return this after the evaluation of `record`; gains below `least` are none.

        Raises:
            ConfigError: it has no such metric.
        """
        choose(f"{self.hook} with metric", self.metric, record.metrics)
        value = record.metrics[self.metric]
        if not self._gains(value, least):
            return dataclasses.replace(self, since=self.since + 1)
        return dataclasses.replace(self, best=value, step=record.step, since=0)

    def save_state(self) -> dict[str, float | str | None]:
        """Return what `load_state` takes."""
        fields = dataclasses.asdict(self)
        del fields["hook"]
        return fields

    def load_state(self, state: dict[str, float | str | None]) -> "Watched":
        """Return this as it was saved; as it is, where another metric was watched then."""
        loaded = dataclasses.replace(self, **state)  # type: ignore[arg-type]
        same = (loaded.metric, loaded.mode) == (self.metric, self.mode)
        return loaded if same else self

    def _gains(self, value: float, least: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > 0 and gain >= least


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise `ConfigError` where `value` is below `least`."""
    if not value >= least:
        raise ConfigError(f"{name}={value}; it is at least {least:g}: raise it")
