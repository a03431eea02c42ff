"""Roofline model: lower bounds on a chip's time, kernel by kernel."""

from dataclasses import dataclass

from replicax.analysis.hardware import Chip
from replicax.analysis.rates import MeasuredRates
from replicax.analysis.schedule import Kernel, Schedule
from replicax.errors import ConfigError

COMPUTE, MEMORY = "compute", "memory"


@dataclass(frozen=True)
class Roofline:
    """Compute and memory time; the longer is the bound (Williams, Waterman and Patterson 2009)."""

    compute_seconds: float
    """Time at the chip's peak FLOP/s."""
    memory_seconds: float
    """Time at the peak bandwidth of its memory."""

    @property
    def seconds(self) -> float:
        """Lower bound on the time."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        """`compute` or `memory`, whichever takes longer."""
        return COMPUTE if self.compute_seconds >= self.memory_seconds else MEMORY


def roofline(flops: float, bytes: float, chip: Chip, dtype: str = "bfloat16") -> Roofline:
    """Return the roofline of one device's FLOPs and bytes, for a program or a single kernel.

    `dtype` is that of the products: `float32`, `bfloat16` or `float16`.

    Raises:
        ConfigError: the chip's speed is unknown, or it has no units for that dtype.
    """
    peak = chip.flops_per_second.get(dtype)
    if peak is None:
        known = ", ".join(chip.flops_per_second) or "none"
        raise ConfigError(
            f"{chip.title}: peak FLOP/s in {dtype} is not known (known: {known}): "
            "plan in a known dtype, or measure with `replicax bench`"
        )
    if chip.memory_bytes_per_second is None:
        raise ConfigError(
            f"{chip.title}: the memory bandwidth is not known: measure with `replicax bench`"
        )
    return Roofline(flops / peak, bytes / chip.memory_bytes_per_second)


def roofline_seconds(flops: float, bytes: float, chip: Chip, dtype: str = "bfloat16") -> float:
    """Return the lower bound for a whole program in which compute and memory traffic overlap.

    It is at most the sum over its kernels. See `roofline`.
    """
    return roofline(flops, bytes, chip, dtype).seconds


_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_TOP = 5


@dataclass(frozen=True)
class KernelTime:
    """A kernel and its total time in a step."""

    kernel: Kernel
    seconds: float
    """Time of all its runs."""
    bound: str
    """`compute` or `memory`; see `roofline`."""


@dataclass(frozen=True)
class Limits:
    """The resources that limit the computation of a step."""

    seconds: float
    compute_share: float
    """Share of the time in compute-bound kernels; the rest is memory-bound."""
    top: tuple[KernelTime, ...]
    """The longest kernels, in descending order."""


def kernel_roofline(
    kernel: Kernel, chip: Chip, dtype: str = "bfloat16", rates: MeasuredRates | None = None
) -> Roofline:
    """Return the roofline of one run of a kernel, at the chip's peaks or at `rates` of its shape.

    Products in a dtype that the chip has no units for are timed as products in `dtype`, and at the
    peak if nothing like them was measured.
    """
    wanted = _DTYPES.get(kernel.dtype, dtype)
    known = wanted if wanted in chip.flops_per_second else dtype
    least = roofline(kernel.flops, kernel.bytes, chip, known)
    if rates is None:
        return least
    rate = rates.flops_per_second(kernel)
    computing = least.compute_seconds if rate is None else kernel.flops / rate
    return Roofline(computing, kernel.bytes / rates.bytes_per_second)


def limits(
    schedule: Schedule, chip: Chip, dtype: str = "bfloat16", rates: MeasuredRates | None = None
) -> Limits:
    """Return the limits of a step's computation; arguments as for `timeline`."""
    times = []
    for kernel in schedule.kernels:
        least = kernel_roofline(kernel, chip, dtype, rates)
        times.append(KernelTime(kernel, kernel.runs * least.seconds, least.bound))
    total = sum(each.seconds for each in times)
    computing = sum(each.seconds for each in times if each.bound == COMPUTE)
    top = sorted(times, key=lambda each: -each.seconds)[:_TOP]
    return Limits(total, computing / total if total else 0.0, tuple(top))
