"""How long processes wait for each other before they give up."""

import dataclasses
import math
from collections.abc import Mapping

from replicax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Patience:
    """When a process counts as stuck. Each limit can be set by the variable in brackets.

    Examples:
        >>> job = rx.initialize(patience=rx.Patience(stall_seconds=300))
    """

    stall_multiple: float = 10.0
    """A process whose step takes this many times the usual is stuck [REPLICAX_STALL_MULTIPLE]."""
    stall_seconds: float = 60.0
    """But never before so many seconds [REPLICAX_STALL_SECONDS]."""
    start_seconds: float = 1800.0
    """The limit until the first step is done, and while anything compiles
    [REPLICAX_START_SECONDS]."""
    silent_seconds: float = 30.0
    """A process that gives no sign of life for so long is frozen or cut off
    [REPLICAX_SILENT_SECONDS]. Below jax's own 100 s, which end in an abort."""

    @property
    def beat_seconds(self) -> float:
        """Between two signs of life."""
        return min(1.0, self.silent_seconds / 8)

    def allowed(self, usual_seconds: float | None) -> float:
        """Seconds without progress for a process whose steps take `usual_seconds`."""
        if usual_seconds is None:
            return self.start_seconds
        return max(self.stall_seconds, self.stall_multiple * usual_seconds)


def find_patience(env: Mapping[str, str]) -> Patience:
    """The limits in `env`, or the usual ones; `ConfigError` for one that is no positive number."""
    limits = {}
    for field in dataclasses.fields(Patience):
        name = f"REPLICAX_{field.name.upper()}"
        if name not in env:
            continue
        try:
            limits[field.name] = float(env[name])
        except ValueError:
            limits[field.name] = math.nan
        if not limits[field.name] > 0:
            raise ConfigError(f"{name}={env[name]}; it is a number above 0: correct or unset it")
    return Patience(**limits)
