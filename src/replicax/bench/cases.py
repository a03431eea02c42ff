"""Which steps are measured: every mode on every device count, scaled two ways.

- strong  the same global batch on every device count
- weak    the same rows on every device, so that the global batch grows with them
"""

import dataclasses
from collections.abc import Sequence

from replicax.core.layout import Layout, check_layout
from replicax.errors import ConfigError

STRONG, WEAK = "strong", "weak"


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to measure."""

    mode: str
    devices: int
    global_batch: int
    """Rows of a batch, before padding."""
    scalings: tuple[str, ...]
    """The scalings it is part of: `strong`, `weak`, or both."""

    def __str__(self) -> str:
        return f"{self.mode} on {self.devices} device{'s' if self.devices > 1 else ''}"


def default_devices(attached: int) -> tuple[int, ...]:
    """The powers of two up to all attached devices, and these."""
    powers = {2**power for power in range(attached.bit_length())}
    return tuple(sorted(powers | {attached}))


def check_devices(devices: Sequence[int], attached: int, platform: str) -> tuple[int, ...]:
    """`devices` in ascending order, each once.

    Raises:
        ConfigError: no count, one below 1, or one above what is attached.
    """
    counts = tuple(sorted(set(devices)))
    if not counts:
        raise ConfigError("devices=() has no count; bench measures at least 1: name some")
    if counts[0] < 1:
        raise ConfigError(f"devices={counts[0]}; a step needs at least 1: raise it")
    if counts[-1] > attached:
        more = f", or start with JAX_NUM_CPU_DEVICES={counts[-1]}" if platform == "cpu" else ""
        raise ConfigError(
            f"devices={counts[-1]} and {attached} attached ({platform}); use at most "
            f"{attached}{more}"
        )
    return counts


def modes_with_layout(
    modes: Sequence[str], layout: Layout, devices: Sequence[int]
) -> tuple[list[str], list[str]]:
    """The modes that can be measured, and a note on each that cannot.

    Raises:
        ConfigError: no mode can, or no such layout.
    """
    check_layout(layout, "jit")
    kept, notes = [], []
    for mode in dict.fromkeys(modes):
        try:
            check_layout(layout, mode)
        except ConfigError as error:
            notes.append(f"{mode} is left out: {error}")
            continue
        if mode == "single" and 1 not in devices:
            counts = ", ".join(map(str, devices))
            notes.append(f"single is left out: it runs on 1 device, and devices are {counts}")
            continue
        kept.append(mode)
    if not kept:
        raise ConfigError(
            f"modes={','.join(modes) or '()'} leaves nothing to measure"
            f"{''.join(f' ({note})' for note in notes)}; add mode jit"
        )
    return kept, notes


def weak_rows(batch_size: int, devices: Sequence[int]) -> int:
    """Rows of a device in the weak scaling: `batch_size` over the most devices, rounded up."""
    return -(-batch_size // max(devices))


def all_cases(
    batch_size: int, devices: Sequence[int], modes: Sequence[str], *, weak: bool
) -> list[Case]:
    """Every case once, those on the same devices beside each other.

    Args:
        batch_size: rows of the strong scaling's global batch.
        devices: counts, in ascending order.
        modes: from `modes_with_layout`.
        weak: whether the rows can be cut for a weak scaling. It has no mode `single`, which has no
            other count to scale to.
    """
    rows = weak_rows(batch_size, devices)
    cases = []
    for count in devices:
        for mode in modes:
            if mode == "single" and count > 1:
                continue
            is_weak = weak and len(devices) > 1 and mode != "single"
            if is_weak and rows * count == batch_size:
                cases.append(Case(mode, count, batch_size, (STRONG, WEAK)))
                continue
            cases.append(Case(mode, count, batch_size, (STRONG,)))
            if is_weak:
                cases.append(Case(mode, count, rows * count, (WEAK,)))
    return cases
