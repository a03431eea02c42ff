"""A plan, and the records that it is made of."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from replicax.core.mesh import DATA, FSDP
from replicax.plan.forecast import ScalingPoint, StepTime
from replicax.plan.memory_formula import MemoryFormula, OnPaper
from replicax.plan.step_traffic import Traffic
from replicax.plan.target import Target


@dataclasses.dataclass(frozen=True)
class Need:
    """The memory of one step on one device."""

    rows: int
    """Rows a replica, padding included."""
    bytes: int
    """Bytes that must be there for it, its state and batch included. Where the compiler refuses the
    step, what it says, which can be less, or by formula."""
    fits: bool
    compiled: bool
    """Whether a compiler has said so; else it is by formula."""
    temporaries: int | None = None
    """Bytes of neither state nor batch, where the compiler tells."""

    @property
    def is_least(self) -> bool:
        """Whether it may be more: the compiler has refused the step, and no more is known."""
        return self.compiled and self.temporaries is None


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """How a batch that does not fit at once does in parts."""

    accumulate: int
    need: Need


@dataclasses.dataclass(frozen=True)
class Alternative:
    """The same rows with one thing changed."""

    change: str
    """`layout=fsdp`, say."""
    need: Need
    freed_bytes: int
    """On each device, against the step without the change and with the same kernels; negative where
    it takes more."""
    note: str = ""
    step_seconds: float | None = None
    """At least; None where it does not compile, or nobody knows the target's speed."""
    wire_bytes: float | None = None
    """Bytes that each device sends in a step; None by formula."""


@dataclasses.dataclass(frozen=True)
class KernelShare:
    """One of the kernels that take longest."""

    name: str
    """Where it was traced."""
    share: float
    """Share of the step's computation."""
    bound: str
    """`compute` or `memory`."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """The least time of a step by the target's data sheet, each kernel at its peaks."""

    rows: int
    """Rows a replica."""
    step: StepTime
    flops: float
    """FLOPs of one device: matrix products and convolutions."""
    peak_share: float
    """HFU: of the chip's peak, if the step took this time."""
    model_share: float | None
    """MFU: the same without FLOPs that compute something again; None where nobody knows them."""
    compute_share: float | None
    """Share of the computation in kernels that the chip's FLOP/s bind and not its memory. None by
    formula."""
    kernels: tuple[KernelShare, ...]
    rows_per_second: float
    """Rows of all devices."""
    tokens_per_second: float | None
    bubble: float = 0.0
    """Share of the computation that a pipeline stage is idle."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The step on other numbers of the same devices."""

    weak: tuple[ScalingPoint, ...]
    """With as many rows on each device."""
    strong: tuple[ScalingPoint, ...]
    """With the same batch, as far as each device has a row."""
    weak_pays: int
    """Devices beyond which twice as many are not worth it; see `forecast.devices_that_pay`."""
    strong_pays: int


@dataclasses.dataclass(frozen=True)
class BatchAdvice:
    """Learning rate and cost of another batch."""

    batch_size: int
    linear: float
    """Times the learning rate of the batch that was asked for, in proportion to the batch, for SGD
    with warm-up (Goyal et al. 2017, arXiv:1706.02677). Both rules hold for batches well below the
    critical one; beyond it neither does."""
    square_root: float
    """Times it in proportion to the root: for Adam (Malladi et al. 2022, arXiv:2205.10287), and
    what keeps the variance of SGD's steps (Krizhevsky 2014, arXiv:1404.5997)."""
    steps: float | None
    """Times the fewest steps to the same loss, where the noise scale is known."""
    examples: float | None
    """Times the fewest rows to it."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and time of a step on hardware that need not be there.

    Examples:
        >>> found = rx.plan(dp, model, source, target="h100:8", by_formula=True)
        >>> print(found.fits, found.largest.rows > 256)
        True True
    """

    about: Mapping[str, Any]
    """Subject of the plan, as JSON values."""
    target: Target
    mesh: Mapping[str, int]
    """Devices along each mesh axis."""
    asked: Need
    """For the batch that was asked for."""
    formula: MemoryFormula
    """Formula of the same."""
    largest: Need | None
    """The most rows of a replica that fit; None where not one does, or nobody knows what fits."""
    too_large: Need | None
    """The fewest rows that were seen not to fit."""
    sizes: tuple[Need, ...]
    """All that were looked at, by rows."""
    micro_batches: MicroBatches | None
    """Where the batch that was asked for does not fit at once."""
    alternatives: tuple[Alternative, ...]
    traffic: Traffic | None
    """Traffic of the batch that was asked for, or the largest; None by formula, or on one
    device."""
    speeds: tuple[Speed, ...]
    """For the batch that was asked for, if it fits, and the largest."""
    scaling: Scaling | None
    """None on one device, and on those of this host."""
    device_hours: float | None
    """At least, for the rows or tokens that were wished for."""
    batches: tuple[BatchAdvice, ...]
    first: str
    """The change to make first."""
    notes: tuple[str, ...]
    """Remarks on what is not as asked for, or not known."""
    on_paper: OnPaper | None = None
    """For a transformer whose sizes are given."""

    @property
    def replicas(self) -> int:
        """How many share the rows: as many as devices, unless several hold one together."""
        return self.mesh[DATA] * self.mesh.get(FSDP, 1)

    @property
    def is_shared(self) -> bool:
        """Whether several devices hold a replica, or replicas a copy of the state, together."""
        return self.mesh[DATA] < self.target.devices

    @property
    def holder(self) -> str:
        """Unit that holds the rows: a `device`, or a `replica` of several devices."""
        return "device" if self.replicas == self.target.devices else "replica"

    @property
    def fits(self) -> bool:
        """Whether the batch that was asked for does."""
        return self.asked.fits

    @property
    def speed(self) -> Speed | None:
        """For the batch that was asked for, or else the largest."""
        return self.speeds[0] if self.speeds else None

    def to_json(self) -> dict[str, Any]:
        """The plan and what follows from it, as `json.dumps(..., allow_nan=False)` takes it."""
        return {**_plain(self), "fits": self.fits}


_FOLLOWS: Mapping[type, tuple[str, ...]] = {
    MemoryFormula: ("state", "temporaries", "total"),
    Traffic: ("wire_bytes", "share"),
    ScalingPoint: ("batch_size", "efficiency", "rows_per_second"),
}
"""Properties that stand beside the fields."""


def _plain(value: Any) -> Any:
    """`value` as JSON: dataclasses are objects, and what JSON does not have is told in words."""
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
