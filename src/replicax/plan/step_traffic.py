"""Bytes that one step sends between devices, and the least that it has to."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from replicax.analysis import hlo
from replicax.analysis.collectives import SLIGHTLY, wire_bytes, wire_bytes_of_all_reduce
from replicax.analysis.schedule import Collective, Kernel, Schedule
from replicax.core.layout import LAYOUTS, Layout
from replicax.core.modes import MODES, Mode
from replicax.wording import size_text

_SMALL_BYTES = 4096
"""Bytes of an array that is not worth a word."""


@dataclass(frozen=True)
class Movement:
    """All collectives of one kind over the same devices in a step, loops multiplied out."""

    kind: str
    count: int
    bytes: int
    """Bytes of the results on one device."""
    wire_bytes: float
    """Bytes that each device sends."""
    asynchronous: bool
    """Whether the device may compute meanwhile."""
    between_seconds: float | None
    """Time of computation between their starts and the uses of their results; None where the
    device's speed is not known."""
    axes: tuple[str, ...] | None = None
    """Mesh axes that they run over; None where it is all of them."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step sends, against those it has to."""

    movements: tuple[Movement, ...]
    """Movements, those that send most first."""
    least_bytes: float
    """Bytes that each device has to send, in this layout; 0 where layers send their activations
    too, of which nobody knows the least."""
    warning: str = ""
    """One line where it sends more, or an array twice."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends."""
        return sum(each.wire_bytes for each in self.movements)

    @property
    def share(self) -> float:
        """Ratio of what it sends to what it has to; 1 where there is nothing to send."""
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
    """Return what a step that was compiled for some devices sends, against what it has to.

    Args:
        schedule: of the compiled step.
        devices: that it was compiled for.
        least_bytes: see `least_wire_bytes`.
        params: the leaves of the parameters, or their shapes: those reduced twice are named.
        mode: of the `DataParallel`; the advice depends on it, and on the layout.
        layout: of the `DataParallel`.
        seconds: of one run of a kernel, where that is known.
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
            f"{size_text(least_bytes)} it has to",
        )
    told = [each for each in found if each]
    return replace(traffic, warning="; ".join([*told, advice(mode, layout)])) if told else traffic


def _reduced_again(collectives: Iterable[Collective], params: Iterable[Any]) -> str:
    """The largest array that is reduced more often than there are parameters of its shape."""
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
    """Return why such a step sends more than it has to, and what to do."""
    if not layout.is_whole:
        return (
            "the compiler reduces whole gradients of which a device keeps a part, as on a CPU, or "
            "splits what is computed and moves that"
        )
    if not mode.per_replica:
        return (
            "the compiler reduces a leaf twice (a tied embedding) or a sum by itself; "
            "mode='shard_map' reduces once"
        )
    return "parts are filled up, or more than gradient and metrics is reduced"


def least_wire_bytes(
    layout: Layout, devices: int, sums_bytes: float, parameter_bytes: float = 0.0, copies: int = 1
) -> float:
    """Return the bytes that each device has to send in one step, at least.

    Reducing a gradient takes 2(n-1)/n of its bytes, however it is done (Patarasuk and Yuan 2009,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations"). Where each device
    updates its part (`zero1`, `fsdp`), it takes half of that, and the parameters are gathered:
    once, or where they are split too (`fsdp`) layer by layer in the forward pass and again in the
    backward pass, as in arXiv:1910.02054. Hybrid sharding has several `copies` of a split state,
    over which a part's gradient is reduced. See `sums_bytes` for those; `parameter_bytes` are of
    the parameters as they are gathered.
    """
    if not layout.splits_optimizer:
        return wire_bytes_of_all_reduce(sums_bytes, devices)
    parts = devices // copies
    gathered = parameter_bytes * (2 if layout.splits_params else 1)
    inside = (parts - 1) / parts * (sums_bytes + gathered)
    return inside + wire_bytes_of_all_reduce(sums_bytes / parts, copies)
