"""The steps to measure: every mode on every device count, in two kinds of scaling.

- strong  the same global batch on every device count
- weak    the same rows per device, so that the global batch grows with the device count
"""

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from replicax.core.data.feed import Split
from replicax.core.modes.mode_table import MODES, as_mode
from replicax.core.placement.layout import Layout, as_layout
from replicax.core.placement.mesh import DATA, STAGE, abstract_mesh, replica_count
from replicax.core.placement.sharding_rules import Rules
from replicax.core.step.reduction import Reduction, as_reduction
from replicax.errors import ConfigError
from replicax.text.wording import counted

STRONG, WEAK = "strong", "weak"


@dataclasses.dataclass(frozen=True)
class Placed:
    """A layout on a mesh, if several are compared; `str` gives its name in tables."""

    layout: Layout
    mesh: Mesh

    def __str__(self) -> str:
        along = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        sizes = [f"{'stages' if axis == STAGE else axis}={size}" for axis, size in along.items()]
        words = [self.layout.name.partition("+")[0]] if self.layout.splits_optimizer else []
        return " ".join([*words, *(sizes if set(along) - {DATA} else [])]) or DATA


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """One step to measure."""

    mode: str
    devices: int
    global_batch: int
    """Rows of a batch, before padding."""
    scalings: tuple[str, ...]
    """The scalings it belongs to: `strong`, `weak`, or both."""
    placed: Placed | None = None
    """The layout, if several are compared."""

    def __str__(self) -> str:
        name = self.mode if self.placed is None else f"{self.mode} {self.placed}"
        return f"{name} on {counted(self.devices, 'device')}"

    @property
    def replicas(self) -> int:
        """Number of replicas that the rows are split over."""
        return self.devices if self.placed is None else replica_count(self.placed.mesh)

    @property
    def place(self) -> int | Placed:
        """The key of the train state that the case runs on."""
        return self.placed or self.devices


def default_devices(attached: int) -> tuple[int, ...]:
    """Powers of two up to the number of attached devices, and that number."""
    powers = {2**power for power in range(attached.bit_length())}
    return tuple(sorted(powers | {attached}))


def device_counts(devices: Sequence[int], attached: int, platform: str) -> tuple[int, ...]:
    """Return `devices` sorted and without duplicates; raise if there are not that many."""
    counts = tuple(sorted(set(devices)))
    if not counts:
        raise ConfigError("devices=() is empty; bench measures at least 1 device count: add one")
    if counts[0] < 1:
        raise ConfigError(f"devices={counts[0]}; a step needs at least 1: raise it")
    if counts[-1] > attached:
        more = f", or start with JAX_NUM_CPU_DEVICES={counts[-1]}" if platform == "cpu" else ""
        raise ConfigError(
            f"devices={counts[-1]} and {attached} attached ({platform}); use at most "
            f"{attached}{more}"
        )
    return counts


def usual_modes() -> list[str]:
    """Return the modes that are measured by default.

    Bitwise modes are left out: on a CPU they need a thread count that affects other modes' times.
    """
    return [name for name, mode in MODES.items() if not mode.bitwise]


def possible_modes(
    modes: Sequence[str],
    devices: Sequence[int],
    layout: str | Rules | Layout = "replicated",
    reduction: str | Reduction = "float32",
) -> tuple[list[str], list[str]]:
    """Return the modes that can be measured, and a note for each that cannot.

    Raises:
        ConfigError: no mode can be measured, or an unknown mode, layout or reduction.
    """
    layout, reduction = as_layout(layout), as_reduction(reduction)
    kept, notes = [], []
    for name in dict.fromkeys(modes):
        mode = as_mode(name)
        try:
            mode.check(abstract_mesh(min(devices)), layout)
            mode.reduce(reduction, None)
            kept.append(name)
        except ConfigError as error:
            notes.append(f"{name} skipped: {error}")
    check_left(kept, notes)
    return kept, notes


def check_left(left: Sequence[object], notes: Sequence[str]) -> None:
    """Raise `ConfigError` if no mode or layout can be measured."""
    if not left:
        raise ConfigError(
            f"0 cases can be measured ({'; '.join(notes) or 'none given'}); add a supported mode "
            "or layout"
        )


def weak_rows(batch_size: int, devices: Sequence[int]) -> int:
    """Rows per device in weak scaling: `batch_size` over the largest count, rounded up."""
    return -(-batch_size // max(devices))


def all_cases(
    batch_size: int, devices: Sequence[int], modes: Sequence[str], *, weak: bool
) -> list[BenchCase]:
    """List every case once, grouped by device count.

    `weak` says whether batches can be resized for weak scaling; a mode that supports only one of
    the counts has no weak scaling.
    """
    rows = weak_rows(batch_size, devices)
    cases = []
    for count in devices:
        for mode in modes:
            most = as_mode(mode).most_devices or max(devices)
            counts = [each for each in devices if each <= most]
            if count not in counts:
                continue
            sizes = {batch_size: (STRONG,)}
            if weak and len(counts) > 1:
                sizes[rows * count] = (*sizes.get(rows * count, ()), WEAK)
            cases += [BenchCase(mode, count, size, scalings) for size, scalings in sizes.items()]
    return cases


def notes_on_cases(batch_size: int, cases: Sequence[BenchCase], accumulate: int) -> list[str]:
    """Return notes on uneven batches; raise if there are fewer rows than micro-batches."""
    notes = []
    most = max(case.replicas for case in cases)
    Split(most, accumulate).padded(batch_size)  # raises if there are too few rows
    rows = weak_rows(batch_size, [most])
    if rows * most != batch_size and any(WEAK in case.scalings for case in cases):
        notes.append(
            f"{batch_size} rows do not divide evenly over {most} devices: weak scaling uses "
            f"{rows} rows per device, {rows * most} on {most}"
        )
    for case in cases:
        size, padded = case.global_batch, Split(case.replicas, accumulate).padded(case.global_batch)
        if padded > size:
            where = f"{case.replicas} {'devices' if case.replicas == case.devices else 'replicas'}"
            micro = f" x {accumulate} micro-batches" if accumulate > 1 else ""
            notes.append(f"{size} rows are padded to {padded} on {where}{micro}")
    return list(dict.fromkeys(notes))
