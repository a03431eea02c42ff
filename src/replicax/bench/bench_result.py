"""The measurements of each case, and the figures derived from them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from replicax.analysis.collectives import wire_bytes
from replicax.analysis.compiled import Collectives
from replicax.bench.cases import STRONG
from replicax.bench.numbers import ratios, spread
from replicax.text.blocks import Reported
from replicax.text.wording import counted, duration


@dataclasses.dataclass(frozen=True)
class LayoutFigures:
    """Figures in which layouts on the same devices differ."""

    name: str
    """The layout and the axes of its mesh: `zero1`, `data=2 model=2`."""
    state_bytes_per_device: int
    """Parameters, optimizer state and model state."""
    sent_bytes: float
    """Bytes that each device sends in a step, with a ring among the devices of each collective."""
    bubble: float | None
    """Computed share of a step in which a pipeline stage is idle; None without stages."""


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """A measured step: mode, device count and global batch. Sequences have one value per round."""

    mode: str
    devices: int
    global_batch: int
    """Rows of a batch, before padding."""
    rows_per_device: int
    """Including padding."""
    padded_rows: int
    """Padding rows of a full batch, over all devices."""
    scalings: tuple[str, ...]
    """`strong`, `weak`, or both."""
    steps_per_round: int
    seconds_per_step: tuple[float, ...]
    rows_per_second: tuple[float, ...]
    """Real rows, over all devices."""
    tokens_per_row: int | None
    input_wait_fraction: tuple[float, ...]
    """Share of the measured time spent waiting for a batch."""
    trace_seconds: float
    """Time to trace and lower the step."""
    compile_seconds: float
    peak_bytes_per_device: int | None
    """Peak memory reported by the compiler, arguments included; None if it reports none."""
    measured_peak_bytes_per_device: int | None
    """Measured peak of the first device in the first steps; None if the device keeps no statistics
    or an earlier case needed more."""
    flops_per_step: int
    """FLOPs of matrix products and convolutions, over all devices, recomputation included: counted
    in the compiled program on a CPU, and in the traced step elsewhere."""
    peak_flops_per_second: float | None
    """Data-sheet peak of all devices together; None if unknown."""
    product_flops_per_second: float | None
    """Rate of a plain matrix product on the same cores; None unless the device is a CPU."""
    collectives: tuple[Collectives, ...]
    least_sent_bytes: float | None
    """Minimum number of bytes each device sends to reduce one gradient; None if the layout or the
    reduction does not reduce it as a whole."""
    efficiency: dict[str, tuple[float, ...]]
    """By scaling, one value per round; relative to the fewest devices of the same mode."""
    layout: LayoutFigures | None = None
    """Set if several layouts are compared."""

    @property
    def name(self) -> str:
        """The mode, followed by the layout if several are compared."""
        return self.mode if self.layout is None else f"{self.mode} {self.layout.name}"

    @property
    def tokens_per_second(self) -> tuple[float, ...] | None:
        """Tokens of real rows per second; None if the tokens per row are unknown."""
        tokens = self.tokens_per_row
        return None if tokens is None else tuple(tokens * rate for rate in self.rows_per_second)

    @property
    def flops_per_second(self) -> float:
        """FLOP/s over all devices in the median round."""
        return self.flops_per_step / spread(self.seconds_per_step)[0]

    @property
    def share_of_peak(self) -> float | None:
        """Share of the data-sheet peak."""
        peak = self.peak_flops_per_second
        return None if peak is None else self.flops_per_second / peak

    @property
    def share_of_product(self) -> float | None:
        """Share of the rate of a plain matrix product on the same cores."""
        rate = self.product_flops_per_second
        return None if rate is None else self.flops_per_second / rate

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in a step, assuming ring algorithms."""
        if self.layout is not None:
            return self.layout.sent_bytes
        return sum(wire_bytes(each, self.devices) for each in self.collectives)


@dataclasses.dataclass(frozen=True)
class Bench(Reported):
    """The results of a benchmark: every mode on every device count.

    Examples:
        >>> result = rx.bench(dp, model, source, batch_size=32, devices=[1],
        ...                   modes=["single"], rounds=1, progress=False)
        >>> print(result.cases[0].mode)
        single
    """

    cases: tuple[CaseResult, ...]
    environment: dict[str, Any]
    """Date, processor, cores, versions."""
    platform: str
    device_kind: str
    parameters: int
    parameter_bytes: int
    """Bytes of the trainable arrays."""
    batch_size: int
    layout: str
    accumulate: int
    precision: str
    rounds: int
    pinned: bool
    """Whether each CPU device had its own core."""
    seed: int
    seconds: float
    """Duration of the whole measurement."""
    notes: tuple[str, ...]
    """Deviations from the request, and caveats needed to interpret the figures."""
    reduction: str = "float32"
    scaled_over: Literal["devices", "processes"] = "devices"
    """The unit of scaling; with processes, each has one device."""

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(case.name for case in self.cases))
        return f"Bench({counted(len(self.cases), 'case')} in {duration(self.seconds)}: {names})"

    @property
    def replica(self) -> str:
        """The unit that holds one replica: a device, or a process with a single device."""
        return "device" if self.scaled_over == "devices" else "process"

    @property
    def compares_layouts(self) -> bool:
        """Whether several layouts are compared, instead of one layout in every mode."""
        return any(case.layout is not None for case in self.cases)

    def scaling(self, name: str) -> list[CaseResult]:
        """The cases of `strong` or `weak` scaling, ordered by mode and then by devices."""
        return by_mode([case for case in self.cases if name in case.scalings])


def by_mode(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Group cases by mode in order of appearance, each sorted by devices and batch."""
    modes = list(dict.fromkeys(case.mode for case in cases))
    return sorted(cases, key=lambda case: (modes.index(case.mode), case.devices, case.global_batch))


def with_efficiency(cases: Sequence[CaseResult]) -> tuple[CaseResult, ...]:
    """Add the efficiency of each case, per round, relative to the fewest devices of its mode.

    Strong scaling: `(n0 t(n0)) / (n t(n))`; weak scaling: `t(n0) / t(n)`.
    """

    def efficiency(case: CaseResult, scaling: str) -> tuple[float, ...]:
        alike = [each for each in cases if each.mode == case.mode and scaling in each.scalings]
        base = min(alike, key=lambda each: each.devices)
        ideal = base.devices / case.devices if scaling == STRONG else 1.0
        pairs = ratios(base.seconds_per_step, case.seconds_per_step)
        return tuple(ratio * ideal for ratio in pairs)

    return tuple(
        dataclasses.replace(
            case, efficiency={scaling: efficiency(case, scaling) for scaling in case.scalings}
        )
        for case in cases
    )
