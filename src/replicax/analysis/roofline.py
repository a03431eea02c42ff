"""How long a chip takes at least for some work, kernel by kernel."""

from dataclasses import dataclass

from replicax.analysis.hardware import Chip
from replicax.analysis.schedule import Kernel, Schedule
from replicax.errors import ConfigError

COMPUTE, MEMORY = "compute", "memory"


@dataclass(frozen=True)
class Roofline:
    """The two times of which the longer one binds (Williams, Waterman and Patterson 2009)."""

    compute_seconds: float
    """At the chip's peak FLOP/s."""
    memory_seconds: float
    """At the peak bandwidth of its memory."""

    @property
    def seconds(self) -> float:
        """The least that the work can take."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        """`compute` or `memory`, whichever takes longer."""
        return COMPUTE if self.compute_seconds >= self.memory_seconds else MEMORY


def roofline(flops: float, bytes: float, chip: Chip, dtype: str = "bfloat16") -> Roofline:
    """The least time of the FLOPs and bytes of one device, in a program or in one kernel.

    `dtype` is that of the products: `float32`, `bfloat16` or `float16`.

    Raises:
        ConfigError: the chip's speed is not known, or it has no units for that dtype.
    """
    peak = chip.flops_per_second.get(dtype)
    if peak is None:
        known = ", ".join(chip.flops_per_second) or "no dtype"
        raise ConfigError(
            f"{chip.title}: its peak in {dtype} is not known, that in {known} is: "
            "plan in one that is known, or measure with `replicax bench`"
        )
    if chip.memory_bytes_per_second is None:
        raise ConfigError(
            f"{chip.title}: the bandwidth of its memory is not known: measure with `replicax bench`"
        )
    return Roofline(flops / peak, bytes / chip.memory_bytes_per_second)


def roofline_seconds(flops: float, bytes: float, chip: Chip, dtype: str = "bfloat16") -> float:
    """The least time of a whole program, whose products and memory traffic all overlap.

    No more than the sum over its kernels. See `roofline`.
    """
    return roofline(flops, bytes, chip, dtype).seconds


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_TOP = 5


@dataclass(frozen=True)
class KernelTime:
    """A kernel, and how long a step is in it."""

    kernel: Kernel
    seconds: float
    """Time of all its runs."""
    bound: str
    """`compute` or `memory`; see `roofline`."""


@dataclass(frozen=True)
class Limits:
    """Resources that the computation of a step waits for."""

    seconds: float
    compute_share: float
    """Share of the time in kernels bound by their FLOPs; the rest is bound by memory."""
    top: tuple[KernelTime, ...]
    """Kernels that take longest, the longest first."""


def kernel_roofline(kernel: Kernel, chip: Chip, dtype: str = "bfloat16") -> Roofline:
    """The least time of one run of a kernel.

    Products in a dtype that the chip has no units for take as long as those in `dtype`.
    """
    own = _DTYPES.get(kernel.dtype, dtype)
    known = own if own in chip.flops_per_second else dtype
    return roofline(kernel.flops, kernel.bytes, chip, known)


def limits(schedule: Schedule, chip: Chip, dtype: str = "bfloat16") -> Limits:
    """Return what the computation of a step waits for; arguments as of `timeline`."""
    times = []
    for kernel in schedule.kernels:
        least = kernel_roofline(kernel, chip, dtype)
        times.append(KernelTime(kernel, kernel.runs * least.seconds, least.bound))
    total = sum(each.seconds for each in times)
    computing = sum(each.seconds for each in times if each.bound == COMPUTE)
    top = sorted(times, key=lambda each: -each.seconds)[:_TOP]
    return Limits(total, computing / total if total else 0.0, tuple(top))
