"""Bytes that one step sends between devices, compared with the minimum required."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from replicax.analysis import hlo
from replicax.analysis.collectives import SLIGHTLY, wire_bytes, wire_bytes_of_all_reduce
from replicax.analysis.schedule import Collective, Kernel, Schedule
from replicax.core.modes.mode_table import MODES, Mode
from replicax.core.placement.layout import LAYOUTS, Layout
from replicax.text.wording import size_text

_SMALL_BYTES = 4096
"""Size of an array, in bytes, up to which it is not reported."""


@dataclass(frozen=True)
class Movement:
    """All collectives of one kind over the same devices in a step, loops unrolled."""

    kind: str
    count: int
    bytes: int
    """Bytes of the results on one device."""
    wire_bytes: float
    """Bytes that each device sends."""
    asynchronous: bool
    """Whether they may overlap with computation."""
    between_seconds: float | None
    """Computation time between their starts and the uses of their results; None if the device's
    speed is unknown."""
    axes: tuple[str, ...] | None = None
    """Mesh axes that they run over; None for all of them."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step sends, compared with the minimum."""

    movements: tuple[Movement, ...]
    """Movements, in descending order of bytes sent."""
    least_bytes: float
    """Minimum bytes that each device must send in this layout; 0 if layers also send activations,
    for which the minimum is unknown."""
    warning: str = ""
    """One line if it sends more, or reduces an array more than once."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends."""
        return sum(each.wire_bytes for each in self.movements)

    @property
    def share(self) -> float:
        """Ratio of bytes sent to the minimum; 1 if there is nothing to send."""
        return self.wire_bytes / self.least_bytes if self.least_bytes else 1.0


def read_traffic(
    schedule: Schedule,
    devices: int,
    least_bytes: float,
    params: Iterable[Any] = (),
    *,
    mode: Mode = MODES["jit"],
    layout: Layout = LAYOUTS["replicated"],
    seconds: Callable[[Kernel], float] | None = None,
) -> Traffic:
    """Return the bytes that a compiled step sends, compared with the minimum.

    Args:
        schedule: the schedule of the compiled step.
        devices: the number of devices it was compiled for.
        least_bytes: see `least_wire_bytes`.
        params: the leaves of the parameters, or their shapes, to name any that are reduced twice.
        mode: the mode of the `DataParallel`; the advice depends on it and on the layout.
        layout: the layout of the `DataParallel`.
        seconds: returns the time of one run of a kernel, if known.
    """
    groups: dict[Any, list[Collective]] = {}
    for each in schedule.collectives:
        if each.devices != 1:
            groups.setdefault((each.kind, each.asynchronous, each.axes), []).append(each)
    movements = [
        Movement(
            kind,
            sum(each.runs for each in members),
            sum(each.runs * each.bytes for each in members),
            sum(each.runs * wire_bytes(each, each.devices or devices) for each in members),
            asynchronous,
            sum(kernel.runs * seconds(kernel) for each in members for kernel in each.between)
            if seconds
            else None,
            axes,
        )
        for (kind, asynchronous, axes), members in groups.items()
    ]
    movements.sort(key=lambda each: -each.wire_bytes)
    traffic = Traffic(tuple(movements), least_bytes)
    if not least_bytes:
        return traffic
    found = [_reduced_again(schedule.collectives, params)]
    if traffic.share > SLIGHTLY:
        found.insert(
            0,
            f"each device sends {size_text(traffic.wire_bytes)}, {traffic.share:.2f} times the "
            f"minimum of {size_text(least_bytes)}",
        )
    told = [each for each in found if each]
    return replace(traffic, warning="; ".join([*told, advice(mode, layout)])) if told else traffic


def _reduced_again(collectives: Iterable[Collective], params: Iterable[Any]) -> str:
    """Describe the largest array reduced more often than there are parameters of its shape."""
    leaves = Counter(tuple(leaf.shape) for leaf in params)
    times: Counter[str] = Counter()
    for each in collectives:
        if each.kind in ("all-reduce", "reduce-scatter") and each.devices != 1:
            for shape in each.shapes:
                times[shape] += each.runs
    again = [
        shape
        for shape, count in times.items()
        if count > leaves[hlo.arrays(shape)[0][1]] > 0 and hlo.shape_bytes(shape) > _SMALL_BYTES
    ]
    shape = max(again, key=hlo.shape_bytes, default="")
    return f"{shape} is reduced {times[shape]} times" if shape else ""


def advice(mode: Mode, layout: Layout = LAYOUTS["replicated"]) -> str:
    """Return why such a step sends more than the minimum, and what to do."""
    if not layout.is_whole:
        return (
            "the compiler reduces whole gradients where a device needs only its shard, as on a "
            "CPU, or shards the computation and moves activations"
        )
    if not mode.per_replica:
        return (
            "the compiler reduces a leaf twice (a tied embedding) or a sum separately; "
            "mode='shard_map' reduces once"
        )
    return "shards are padded, or more than the gradient and metrics is reduced"


def least_wire_bytes(
    layout: Layout, devices: int, sums_bytes: float, parameter_bytes: float = 0.0, copies: int = 1
) -> float:
    """Return the minimum bytes that each device must send in one step.

    Any all-reduce of a gradient sends 2(n-1)/n of its bytes (Patarasuk and Yuan 2009, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations"). If each device updates its shard
    (`zero1`, `fsdp`), the gradient takes half of that, and the parameters are gathered: once, or,
    if they are sharded too (`fsdp`), layer by layer in the forward pass and again in the backward
    pass, as in arXiv:1910.02054. Hybrid sharding has several `copies` of a sharded state, over
    which each gradient shard is reduced. `sums_bytes` is the result of the function of that name;
    `parameter_bytes` are the bytes of the parameters as gathered.
    """
    if not layout.splits_optimizer:
        return wire_bytes_of_all_reduce(sums_bytes, devices)
    parts = devices // copies
    gathered = parameter_bytes * (2 if layout.splits_params else 1)
    inside = (parts - 1) / parts * (sums_bytes + gathered)
    return inside + wire_bytes_of_all_reduce(sums_bytes / parts, copies)
