"""The plan and the records it consists of."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from replicax.core.placement.mesh import DATA, FSDP
from replicax.plan.forecast import ScalingPoint, StepTime
from replicax.plan.island_exchange import IslandExchange
from replicax.plan.memory_formula import MemoryFormula, OnPaper
from replicax.plan.slow_links import SlowLinks
from replicax.plan.step_traffic import Traffic
from replicax.plan.target import Target
from replicax.text.blocks import Reported
from replicax.text.wording import size_text

FORMULA_ERROR = 0.3
"""Share by which a formula may be wrong, scaled to a compiled step or not; the most measured is in
`docs/plan.md`."""
AT_RATES = "at measured rates"
"""Name of `Speed.at_rates` on the screen."""
LATER_PARTS = ("batch", "change")
"""Parts of a plan that come after the answer for the requested batch, in this order."""


@dataclasses.dataclass(frozen=True)
class Need:
    """The memory of one step on one device."""

    rows: int
    """Rows per replica, including padding."""
    bytes: int
    """Total bytes, including state and batch. If the compiler rejects the step, a lower bound: what
    it reports, or the formula."""
    fits: bool
    compiled: bool
    """Whether a compiler determined it; otherwise it is by formula."""
    temporaries: int | None = None
    """Bytes other than state and batch, if the compiler reports them."""

    @property
    def is_least(self) -> bool:
        """Whether `bytes` is a lower bound, because the compiler rejected the step."""
        return self.compiled and self.temporaries is None


def unclear(least: float, most: float, room: int | None) -> bool:
    """Return whether bytes by formula, between two figures, may fit in `room` or not."""
    error = 1 + FORMULA_ERROR
    return room is not None and least / error <= room < most * error


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Gradient accumulation with which a batch fits that does not fit at once."""

    accumulate: int
    need: Need


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A step on the same rows with one setting changed."""

    change: str
    """Description of the change, such as `layout=fsdp`."""
    need: Need
    freed_bytes: int
    """Bytes freed per device, relative to the unchanged step with the same kernels; negative if the
    change needs more."""
    note: str = ""
    step_seconds: float | None = None
    """Lower bound; None if it does not compile or the target's speed is unknown."""
    wire_bytes: float | None = None
    """Bytes that each device sends in a step; None by formula."""
    unclear: bool = False
    """Whether the formula is too near the memory of a device to tell whether the change fits."""


@dataclasses.dataclass(frozen=True)
class KernelShare:
    """One of the longest-running kernels."""

    name: str
    """Name scope in which it was traced."""
    share: float
    """Share of the step's computation."""
    bound: str
    """`compute` or `memory`."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Lower bound on a step's time from the target's data sheet, each kernel at its peaks."""

    rows: int
    """Rows per replica."""
    step: StepTime
    flops: float
    """FLOPs of one device: matrix products and convolutions."""
    peak_share: float
    """HFU: share of the chip's peak FLOP/s, if the step took this time."""
    model_share: float | None
    """MFU: the same without recomputed FLOPs; None if those are unknown."""
    compute_share: float | None
    """Share of the computation in compute-bound, not memory-bound, kernels. None by formula."""
    kernels: tuple[KernelShare, ...]
    rows_per_second: float
    """Rows per second of all devices."""
    tokens_per_second: float | None
    bubble: float = 0.0
    """Share of the computation time that a pipeline stage is idle."""
    at_rates: "Speed | None" = None
    """The speed, no bound, if each kernel is as fast as such kernels ran alone on such a chip; None
    by formula, and for chips of which no rates were measured."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The step on other numbers of the same devices."""

    weak: tuple[ScalingPoint, ...]
    """With the same rows per device."""
    strong: tuple[ScalingPoint, ...]
    """With the same global batch, up to one row per device."""
    weak_pays: int
    """Devices beyond which doubling does not pay off; see `forecast.devices_that_pay`."""
    strong_pays: int


@dataclasses.dataclass(frozen=True)
class BatchAdvice:
    """Learning rate and cost of another batch size."""

    batch_size: int
    linear: float
    """Factor on the learning rate of the requested batch by linear scaling, for SGD with warm-up
    (Goyal et al. 2017, arXiv:1706.02677). Both rules are valid only for batches well below the
    critical batch size."""
    square_root: float
    """Factor by square-root scaling: for Adam (Malladi et al. 2022, arXiv:2205.10287), and to keep
    the variance of SGD's steps (Krizhevsky 2014, arXiv:1404.5997)."""
    steps: float | None
    """Factor on the minimum steps to the same loss, if the noise scale is known."""
    examples: float | None
    """Factor on the minimum rows to the same loss."""


@dataclasses.dataclass(frozen=True)
class Plan(Reported):
    """Memory and time of a step on hardware that need not be attached.

    Examples:
        >>> found = rx.plan(dp, model, source, batch_size=32, target="h100:8", by_formula=True)
        >>> print(found.fits, found.largest.rows)
        True 32
        >>> print(str(found).split()[0])  # the table; a notebook shows it as HTML
        plan
    """

    about: Mapping[str, Any]
    """Subject of the plan, as JSON values."""
    target: Target
    mesh: Mapping[str, int]
    """Devices along each mesh axis."""
    asked: Need
    """Memory of the requested batch."""
    formula: MemoryFormula
    """The formula for the same batch."""
    largest: Need | None
    """The most rows per replica that fit; None if not even one does or the capacity is unknown."""
    too_large: Need | None
    """The fewest rows found not to fit."""
    sizes: tuple[Need, ...]
    """All sizes tried, by rows."""
    micro_batches: MicroBatches | None
    """Micro-batches that fit, if the requested batch does not fit at once."""
    alternatives: tuple[Alternative, ...]
    traffic: Traffic | None
    """Traffic of the requested batch, or else the largest; None by formula or on one device."""
    speeds: tuple[Speed, ...]
    """Speed of the requested batch, if it fits, and of the largest."""
    scaling: Scaling | None
    """None on one device and on CPU devices."""
    device_hours: float | None
    """Lower bound for the wished rows or tokens."""
    batches: tuple[BatchAdvice, ...]
    first: str
    """The change to make first."""
    notes: tuple[str, ...]
    """Deviations from the request, and unknowns."""
    on_paper: OnPaper | None = None
    """For a transformer whose sizes are given."""
    islands: IslandExchange | None = None
    """The exchange of the islands, if any; all else is of one island with the whole batch."""
    slow_links: SlowLinks | None = None
    """Methods of training over a network between islands, if one is given."""
    left: tuple[str, ...] = ()
    """Names in `LATER_PARTS` that are not known yet, while a plan is being made, and before them ""
    while the requested batch is known by formula only."""

    def __repr__(self) -> str:
        need = f"{self.asked.rows:,} rows per {self.holder} take {size_text(self.asked.bytes)}"
        return f"Plan({self.target.text}, fits={self.fits}, {need})"

    @property
    def replicas(self) -> int:
        """The number of replicas that share the rows."""
        return self.mesh[DATA] * self.mesh.get(FSDP, 1)

    @property
    def is_shared(self) -> bool:
        """Whether several devices share a replica, or several replicas a copy of the state."""
        return self.mesh[DATA] < self.target.devices

    @property
    def holder(self) -> str:
        """The unit that holds rows: a `device`, or a `replica` of several devices."""
        return "device" if self.replicas == self.target.devices else "replica"

    @property
    def fits(self) -> bool:
        """Whether the requested batch fits."""
        return self.asked.fits

    @property
    def speed(self) -> Speed | None:
        """Speed of the requested batch, or else of the largest."""
        return self.speeds[0] if self.speeds else None

    @property
    def fewer_devices(self) -> int | None:
        """Devices on which the batch is fastest and fits, if the target's mostly wait for others.

        What each then holds is at most what all of them hold now.
        """
        usable = self.target.chip.usable_bytes
        if not self.fits or self.speed is None or self.scaling is None or usable is None:
            return None
        step, enough = self.speed.step, self.scaling.strong_pays
        waits = step.exposed_seconds > step.seconds / 2
        fits = self.asked.bytes * self.target.devices <= enough * usable
        return enough if waits and fits and enough < self.target.devices else None

    def to_json(self) -> dict[str, Any]:
        """Return the plan and derived values, ready for `json.dumps(..., allow_nan=False)`."""
        return {**_plain(self), "fits": self.fits}


_FOLLOWS: Mapping[type, tuple[str, ...]] = {
    MemoryFormula: ("state", "temporaries", "total"),
    Traffic: ("wire_bytes", "share"),
    ScalingPoint: ("batch_size", "efficiency", "rows_per_second"),
}
"""Properties exported along with the fields."""


def _plain(value: Any) -> Any:
    """Convert `value` to JSON: dataclasses become objects, unsupported types strings."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += _FOLLOWS.get(type(value), ())
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
