"""Published bandwidths for a compute utilization, and the same by `plan`'s formula.

Table 4 of "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512) and table 6 of
"Scaling Laws for DiLoCo" (arXiv 2503.09799), which uses the simulator of the former: one node for
each layer's forward pass, backward pass and reduction (section 3.1), 16-bit gradients, two sites,
so that an all-reduce sends 2 (M - 1) / M = 1 copy, and no latency. Hence the reduction may last for
the backward pass, 2/3 of a step, without being waited for, except that of its last layer if the
whole model is sent. A streamed fragment is 3 layers, strided: fragment p of P has the layers p,
p + P and p + 2P, and the forward pass up to layer p hides its last reduction, too. If overlapped,
it is needed one step later (tau = 1).

Bandwidths are of a grid of 50 from 0.1 to 1,000 Gbit/s. The printed one is the last that does not
suffice: table 1 of 2501.18512 has 0.67 h of computation in 0.88 h at 1 Gbit/s, which is 76%, for
the model and method for which table 4 prints 0.9 Gbit/s as of 80%.
"""

import math
from dataclasses import dataclass

from replicax.plan.slow_links import utilization

UTILIZATIONS = 0.5, 0.8, 0.9, 0.95, 0.99
GRID_STEPS, GRID_LEAST, GRID_MOST = 49, 0.1, 1000.0
_BACKWARD = 2 / 3
"""Share of a step in the backward pass: Kaplan et al. 2020."""
_LAYERS_OF_A_FRAGMENT = 3


@dataclass(frozen=True)
class PublishedRow:
    """A row of one of the tables."""

    source: str
    model: str
    parameters: float
    layers: int
    step_seconds: float
    method: str
    every: int
    gigabits_per_second: tuple[float, ...]
    """By utilization; 1,000 is printed as "1000.0+" in one place."""
    bits: int = 16
    streamed: bool = False
    delay_steps: int = 0

    def share(self, gigabits_per_second: float) -> float:
        """Return the utilization by the formula."""
        step, fragments = self.step_seconds, 1
        whole = self.parameters * self.bits / (gigabits_per_second * 1e9)
        tail = whole / self.layers
        if self.streamed:
            fragments = self.layers // _LAYERS_OF_A_FRAGMENT
            hidden = [
                (number / self.layers + self.delay_steps) * step for number in range(fragments)
            ]
            tail = sum(max(0.0, tail - each) for each in hidden) / fragments
        hides = (_BACKWARD + self.delay_steps) * step
        return utilization(step * self.every / fragments, whole / fragments, hides, tail)

    def required(self, share: float) -> float:
        """Return the Gbit/s for a utilization, by bisection."""
        low, high = 1e-3, 1e6
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.share(middle) >= share else (middle, high)
        return high

    def steps_apart(self) -> list[int]:
        """Return, by utilization, how many grid steps the formula is above the print."""
        wanted = (self.required(share) for share in UTILIZATIONS)
        return [
            math.floor(_place(own)) - round(_place(printed))
            for own, printed in zip(wanted, self.gigabits_per_second, strict=True)
        ]


def _place(gigabits_per_second: float) -> float:
    """Return the place on the grid, from 0 to 49."""
    decades = math.log10(GRID_MOST / GRID_LEAST)
    return GRID_STEPS * math.log10(gigabits_per_second / GRID_LEAST) / decades


def _streaming(
    model: str, parameters: float, layers: int, seconds: float, *printed: tuple[float, ...]
) -> tuple[PublishedRow, ...]:
    source = "2501.18512 table 4"
    kinds: tuple[tuple[str, int, int, bool, int], ...] = (
        ("data parallel", 1, 16, False, 0),
        ("DiLoCo", 100, 16, False, 0),
        ("streaming", 100, 16, True, 0),
        ("streaming, overlapped", 100, 16, True, 1),
        ("streaming, overlapped, FP4", 100, 4, True, 1),
    )
    return tuple(
        PublishedRow(
            source, model, parameters, layers, seconds, method, every, rates, bits, streamed, delay
        )
        for (method, every, bits, streamed, delay), rates in zip(kinds, printed, strict=True)
    )


def _scaling_laws(
    model: str, parameters: float, layers: int, seconds: float, *printed: tuple[float, ...]
) -> tuple[PublishedRow, ...]:
    kinds = ("data parallel", 1), *((f"DiLoCo, H = {h}", h) for h in (1, 10, 50, 100, 300))
    return tuple(
        PublishedRow("2503.09799 table 6", model, parameters, layers, seconds, method, every, rates)
        for (method, every), rates in zip(kinds, printed, strict=True)
    )


_CHINCHILLA = (104.8, 184.2, 222.3, 222.3, 390.7)
_LLAMA = (126.5, 222.3, 268.3, 323.8, 323.8)
_DEEPSEEK = (323.8, 569.0, 686.6, 686.6, 1000.0)
TABLE_4: tuple[PublishedRow, ...] = (
    *_streaming(
        *("1B", 1e9, 24, 0.1),
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    *_streaming(
        *("10B", 1e10, 48, 0.8),
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    *_streaming(
        *("100B", 1e11, 108, 4.9),
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
)
TABLE_6: tuple[PublishedRow, ...] = (
    *_scaling_laws(
        *("Chinchilla 10B", 1e10, 48, 0.8),
        *(_CHINCHILLA, _CHINCHILLA),
        (16.0, 49.4, 86.8, 152.6, 222.3),
        (3.0, 11.0, 23.3, 41.0, 126.5),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (0.5, 2.0, 4.3, 9.1, 41.0),
    ),
    *_scaling_laws(
        *("Llama 3 405B", 4.05e11, 126, 26.0),
        *(_LLAMA, _LLAMA),
        (19.3, 72.0, 126.5, 184.2, 268.3),
        (3.6, 13.3, 28.1, 59.6, 184.2),
        (2.0, 7.5, 16.0, 33.9, 126.5),
        (0.7, 3.0, 6.2, 13.3, 59.6),
    ),
    *_scaling_laws(
        *("DeepSeek-V3 671B", 6.71e11, 61, 20.0),
        *(_DEEPSEEK, _DEEPSEEK),
        (49.4, 152.6, 268.3, 390.7, 686.6),
        (7.5, 33.9, 72.0, 126.5, 390.7),
        (4.3, 16.0, 41.0, 72.0, 268.3),
        (1.7, 6.2, 13.3, 28.1, 126.5),
    ),
)
