"""The loss over the steps as an SVG of a few kilobytes, for notebooks.

It is plain Python, 1.3 ms for 1,000 records, so that it can be redrawn while a run trains; and in
the page's own color, so that it is read on light and dark pages.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from html import escape

from replicax.text.wording import number_text
from replicax.train.files.records import Record
from replicax.train.hooks.drawing import EVAL, LOG_SCALE_FROM, TRAIN, panels_of, thinned

_WIDTH, _HEIGHT = 560, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 20, 24
_MOST_POINTS, _MOST_MARKERS = 200, 20
Points = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """The loss of the records, as a part of a report; nothing if there are less than two."""

    records: Sequence[Record]

    def lines(self) -> list[str]:
        return []

    def html(self) -> str:
        finite = {name: _finite(points) for name, points in self._series().items()}
        series = {name: points for name, points in finite.items() if points}
        every = [point for points in series.values() for point in points]
        if len({step for step, _ in every}) < 2:
            return ""
        steps, values = zip(*every, strict=True)
        axes = _Axes(min(steps), max(steps), min(values), max(values))
        drawn = [axes.html()]
        colors = itertools.cycle(EVAL)
        for number, (name, points) in enumerate(series.items()):
            color = TRAIN if name == "train" else next(colors)
            drawn.append(_line(axes, points, color, few=name != "train"))
            at = _LEFT + 8 + 80 * number
            drawn.append(
                f'<rect x="{at}" y="7" width="14" height="3" fill="{color}"/>'
                f'<text x="{at + 19}" y="12">{escape(name)}</text>'
            )
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="width:100%;max-width:{_WIDTH}px" '
            'font-family="sans-serif" font-size="11" fill="currentColor" role="img" '
            f'aria-label="loss over {max(steps):,} steps">{"".join(drawn)}</svg>'
        )

    def _series(self) -> dict[str, Points]:
        return panels_of(self.records).get("loss", {})


@dataclasses.dataclass(frozen=True)
class _Axes:
    first: int
    last: int
    low: float
    high: float

    @property
    def log(self) -> bool:
        return self.low > 0 and self.high / self.low > LOG_SCALE_FROM

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def html(self) -> str:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        drawn = []
        for value in _powers(self.low, self.high) if self.log else _ticks(self.low, self.high):
            y = f"{self.y(value):.1f}"
            drawn.append(
                f'<path d="M{_LEFT} {y}H{right}" stroke="currentColor" opacity=".2"/>'
                f'<text x="{_LEFT - 6}" y="{y}" dy=".35em" text-anchor="end">{value:.4g}</text>'
            )
        for step in _ticks(self.first, self.last):
            if step == int(step):
                x, end = self.x(step), step > self.first + 0.95 * (self.last - self.first)
                anchor = "end" if end else "middle"
                drawn.append(
                    f'<text x="{x + 8 * end:.1f}" y="{bottom + 16}" text-anchor="{anchor}">'
                    f"{number_text(int(step))}</text>"
                )
        drawn.append(
            f'<path d="M{_LEFT} {bottom}H{right}" stroke="currentColor" opacity=".6"/>'
            f'<text x="{right}" y="12" text-anchor="end">loss over steps</text>'
        )
        return "".join(drawn)


def _line(axes: _Axes, points: Points, color: str, *, few: bool) -> str:
    places = [(axes.x(step), axes.y(value)) for step, value in points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    drawn = f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.8"/>'
    if len(points) == 1 or (few and len(points) <= _MOST_MARKERS):
        drawn += "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places
        )
    return drawn


def _finite(points: Sequence[tuple[int, float]]) -> Points:
    return [each for each in thinned(points, _MOST_POINTS) if math.isfinite(each[1])]


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / 4
    size = 10 ** math.floor(math.log10(rough))
    size *= next(factor for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * 0.999)
    return [
        n * size for n in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)
    ]


def _powers(low: float, high: float) -> list[float]:
    """Return the powers of ten from `low` to `high`, at most about five."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**n for n in range(first, last + 1, max((last - first) // 4, 1))]
