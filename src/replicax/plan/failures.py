"""Goodput under failures: restarts from checkpoints, and islands that lose one of them.

Goodput is the useful share of all devices' time. Failures are independent and exponential, and a
device fails while it computes. The interval of checkpoints is that of Young (1974), as refined by
Daly (2006), whose exponential form gives the work that is lost with them. A stop is counted once:
no device fails during it. Islands that all fail at once are not counted either.
"""

import math
from dataclasses import dataclass

from replicax.errors import ConfigError
from replicax.text.arguments import Count, NotNegative, Positive

DEVICE_MTBF_HOURS = 50_677.0
"""Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783)."""
USUAL_ISLANDS = 8
WORTH = 0.01
"""Goodput that a less simple strategy must gain to be worth it."""
RESTART, EVERY_STEP, EVERY_H = "restart from checkpoints", "islands, every step", "islands, every H"


@dataclass(frozen=True)
class Failures:
    """A job on devices that fail, and what a failure costs it."""

    devices: Count
    """Devices of the whole job."""
    device_mtbf_hours: Positive = DEVICE_MTBF_HOURS
    """Mean hours of computing between failures of one device."""
    failures_per_hour: Positive | None = None
    """Failures of the whole job in an hour of computing."""
    restart_seconds: NotNegative = 600.0
    """Seconds from a failure until a job restarted from its checkpoint computes again."""
    save_seconds: NotNegative = 5.0
    """Seconds for which a checkpoint stops the computation."""
    save_every_seconds: Positive | None = None
    """Seconds of computing between checkpoints; by default the optimum of Young and Daly."""
    islands: Count | None = None
    """Islands that the devices are divided into; by default 8, or one for each device."""
    pause_seconds: NotNegative = 10.0
    """Seconds for which islands that exchange every step stop when one fails."""
    recovery_seconds: NotNegative = 600.0
    """Seconds from a failure until the island is back."""
    every: Count = 30
    """Steps from one exchange to the next, of islands that do not exchange every step."""
    step_seconds: Positive = 10.0
    """Seconds of a step."""

    @property
    def island_count(self) -> int:
        """The number of islands."""
        return min(USUAL_ISLANDS, self.devices) if self.islands is None else self.islands

    @property
    def mtbf_seconds(self) -> float:
        """Mean time of computing between failures of any device."""
        if self.failures_per_hour is not None:
            return 3600 / self.failures_per_hour
        return 3600 * self.device_mtbf_hours / self.devices


@dataclass(frozen=True)
class StrategyGoodput:
    """The goodput of one strategy."""

    strategy: str
    goodput: float
    lost: str
    """The cost of a failure, in words."""


@dataclass(frozen=True)
class FailureForecast:
    """The strategies, from the simplest, and the one to use."""

    failures: Failures
    mtbf_seconds: float
    save_every_seconds: float
    strategies: tuple[StrategyGoodput, ...]
    recommended: str


def goodput_forecast(failures: Failures) -> FailureForecast:
    """Return the goodput of the three strategies.

    Examples:
        >>> found = goodput_forecast(Failures(devices=100_000, islands=12))
        >>> print(found.recommended, *(f"{each.goodput:.0%}" for each in found.strategies))
        islands, every step 70% 97% 97%

    Raises:
        ConfigError: fewer than two islands, or more than devices.
    """
    job, mtbf, islands = failures, failures.mtbf_seconds, failures.island_count
    if not 2 <= islands <= job.devices:
        raise ConfigError(
            f"islands={islands} with devices={job.devices}; one island must live on when "
            "another fails, and each has a device: give from 2 islands to one for each device"
        )
    interval = job.save_every_seconds or save_interval(job.save_seconds, mtbf)
    local = (job.every - 1) / 2 * job.step_seconds
    found = (
        StrategyGoodput(
            RESTART,
            restarted(mtbf, job.restart_seconds, job.save_seconds, interval),
            "all stop and repeat unsaved steps",
        ),
        StrategyGoodput(
            EVERY_STEP,
            islands_goodput(mtbf, islands, job.recovery_seconds, job.pause_seconds),
            "one island is away; others pause",
        ),
        StrategyGoodput(
            EVERY_H,
            islands_goodput(mtbf, islands, job.recovery_seconds + local),
            "one is away and loses H/2 steps",
        ),
    )
    best = max(each.goodput for each in found)
    chosen = next(each for each in found if each.goodput >= best - WORTH)
    return FailureForecast(job, mtbf, interval, found, chosen.strategy)


def save_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of computing between checkpoints that lose least: Daly 2006."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = save_seconds / (2 * mtbf_seconds)
    interval = math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9)
    return interval - save_seconds


def kept(mtbf_seconds: float, save_seconds: float, interval_seconds: float) -> float:
    """Return the share of computing that is neither repeated nor spent on checkpoints."""
    if not interval_seconds:  # saved all the time, at no cost
        return 1.0
    segment = (interval_seconds + save_seconds) / mtbf_seconds
    return interval_seconds / mtbf_seconds * math.exp(-segment) / -math.expm1(-segment)


def restarted(
    mtbf_seconds: float, restart_seconds: float, save_seconds: float, interval_seconds: float
) -> float:
    """Return the goodput of a job that stops at every failure, and restarts from a checkpoint."""
    running = mtbf_seconds / (mtbf_seconds + restart_seconds)
    return running * kept(mtbf_seconds, save_seconds, interval_seconds)


def islands_goodput(
    mtbf_seconds: float, islands: int, recovery_seconds: float, pause_seconds: float = 0.0
) -> float:
    """Return the goodput of islands, of which one that fails is away, and the others pause."""
    own = islands * mtbf_seconds
    present = own / (own + recovery_seconds)
    return present / (1 + present * pause_seconds / mtbf_seconds)
