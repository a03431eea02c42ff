"""How long processes wait for each other."""

import dataclasses
import math
from collections.abc import Mapping

from replicax.arguments import Positive, typed
from replicax.errors import ConfigError


@typed
@dataclasses.dataclass(frozen=True)
class Patience:
    """Timeouts after which a process counts as stuck, with the variables that set them.

    Examples:
        >>> job = rx.initialize(patience=rx.Patience(stall_seconds=300))
    """

    stall_multiple: Positive = 10.0
    """Timeout of a step, as a multiple of the median step time [REPLICAX_STALL_MULTIPLE]."""
    stall_seconds: Positive = 60.0
    """Minimum timeout of a step [REPLICAX_STALL_SECONDS]."""
    start_seconds: Positive = 1800.0
    """Timeout until the first step is done, and during compilation
    [REPLICAX_START_SECONDS]."""
    silent_seconds: Positive = 30.0
    """Timeout for heartbeats; a process without one is frozen or unreachable
    [REPLICAX_SILENT_SECONDS]. Below JAX's own 100 s, which end in an abort."""

    @property
    def beat_seconds(self) -> float:
        """Interval between heartbeats."""
        return min(1.0, self.silent_seconds / 8)

    def allowed(self, usual_seconds: float | None) -> float:
        """Return how long a process may make no progress if its steps take `usual_seconds`."""
        if usual_seconds is None:
            return self.start_seconds
        return max(self.stall_seconds, self.stall_multiple * usual_seconds)


def find_patience(env: Mapping[str, str]) -> Patience:
    """Return the limits in `env`, else the defaults; `ConfigError` if one is not positive."""
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
            raise ConfigError(f"{name}={env[name]}; it must be above 0: correct or unset it")
    return Patience(**limits)
