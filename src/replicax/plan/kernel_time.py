"""A schedule on a chip -> when kernels run and collectives may, and what takes the time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from replicax.analysis.hardware import Chip
from replicax.plan.overlap import Transfer
from replicax.plan.roofline import COMPUTE, Roofline, roofline
from replicax.plan.schedule import Collective, Kernel, Loop, Schedule, Step, Wait

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_TOP = 5


@dataclass(frozen=True)
class KernelTime:
    """A kernel, and how long a step is in it."""

    kernel: Kernel
    seconds: float
    """Of all its runs."""
    bound: str
    """`compute` or `memory`; see `roofline`."""


@dataclass(frozen=True)
class Limits:
    """What the computation of a step waits for."""

    seconds: float
    compute_share: float
    """Of the time, that in kernels bound by their FLOPs; the rest is bound by memory."""
    top: tuple[KernelTime, ...]
    """Those that take longest, the longest first."""


def kernel_roofline(kernel: Kernel, chip: Chip, dtype: str = "bfloat16") -> Roofline:
    """The least time of one run of a kernel.

    Args:
        kernel: of a schedule.
        chip: the device.
        dtype: of products in a dtype that the chip has no units of its own for.

    Raises:
        ConfigError: the chip's speed is not known.
    """
    own = _DTYPES.get(kernel.dtype, dtype)
    known = own if own in chip.flops_per_second else dtype
    return roofline(kernel.flops, kernel.bytes, chip, known)


def timeline(
    schedule: Schedule, chip: Chip, dtype: str = "bfloat16"
) -> tuple[float, tuple[Transfer, ...]]:
    """When each collective of a step may start and is needed, in seconds of its computation.

    Kernels run one after another, each as long as its FLOPs or its bytes take at the chip's peaks,
    whichever is longer. A TPU's copies onto its chip, which run beside the computation, count as
    kernels, because they take of the same memory bandwidth.

    Args:
        schedule: of `read_schedule`.
        chip: the device.
        dtype: see `kernel_roofline`.

    Returns:
        The seconds of computation in a step, and the collectives in the order in which they are
        needed, those of a loop once for each run.
    """
    clock = _Clock(lambda kernel: kernel_roofline(kernel, chip, dtype).seconds)
    clock.run(schedule.steps)
    return clock.now, tuple(clock.transfers)


@dataclass
class _Clock:
    seconds: Callable[[Kernel], float]
    now: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    started: dict[str, tuple[Collective, float]] = field(default_factory=dict)

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Kernel):
                self.now += step.share * self.seconds(step)
            elif isinstance(step, Collective):
                self.started[step.name] = step, self.now
            elif isinstance(step, Wait):
                collective, ready = self.started.pop(step.collective)
                size = collective.share * collective.bytes
                sent = Transfer(collective.kind, size, ready, self.now, axes=collective.axes)
                self.transfers.append(sent)
            else:
                self._repeat(step)

    def _repeat(self, loop: Loop) -> None:
        if Schedule(loop.steps).collectives:
            for _ in range(loop.trips):
                self.run(loop.steps)
            return
        started = self.now
        self.run(loop.steps)
        self.now = started + loop.trips * (self.now - started)


def limits(schedule: Schedule, chip: Chip, dtype: str = "bfloat16") -> Limits:
    """What the computation of a step waits for; arguments as of `timeline`."""
    times = []
    for kernel in schedule.kernels:
        least = kernel_roofline(kernel, chip, dtype)
        times.append(KernelTime(kernel, kernel.runs * least.seconds, least.bound))
    total = sum(each.seconds for each in times)
    computing = sum(each.seconds for each in times if each.bound == COMPUTE)
    top = sorted(times, key=lambda each: -each.seconds)[:_TOP]
    return Limits(total, computing / total if total else 0.0, tuple(top))
