"""How long a chip takes at least for some work."""

from dataclasses import dataclass

from replicax.analysis.hardware import Chip
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
    """The least time of a program, or of one kernel.

    Args:
        flops: of one device.
        bytes: that one device reads from its memory and writes to it.
        chip: the device.
        dtype: of the products, `float32`, `bfloat16` or `float16`.

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
