"""The picture of memory over time shows what its timeline holds."""

from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from support.tiers import exhaustive

from replicax.bench.memory_curve import BACKWARD, FORWARD, IDLE, REDUCTION, UPDATE, Timeline
from replicax.bench.memory_plot import COLOURS, STATE_COLOUR, draw_memory

MIB = 1 << 20


def timeline(
    phases: list[tuple[str, float, int]], *, state: int = 30 * MIB, measured: bool = True
) -> Timeline:
    """Two steps of the same phases: name, seconds and bytes of each."""
    twice = [*phases, (IDLE, 0.005, state), *phases]
    edges = np.concatenate([[0.0], np.cumsum([seconds for _, seconds, _ in twice])])
    return Timeline(
        edges,
        np.asarray([size for *_, size in twice], np.int64),
        tuple(name for name, *_ in twice),
        (0.0, float(edges[len(phases) + 1])),
        state,
        80 * MIB,
        measured,
    )


USUAL = [
    (FORWARD, 0.02, 50 * MIB),
    (BACKWARD, 0.04, 80 * MIB),
    (REDUCTION, 0.01, 60 * MIB),
    (UPDATE, 0.01, 60 * MIB),
]


def draw(data: Timeline, folder: Path) -> np.ndarray:
    """Height, width and red, green, blue of the picture, from 0 to 1."""
    draw_memory(data, folder / "memory.png", "a run · 8 devices")
    return np.asarray(matplotlib.image.imread(folder / "memory.png")[..., :3])


def share(image: np.ndarray, colour: str) -> float:
    """Share of the pixels that have a colour."""
    near = np.abs(image - np.asarray(matplotlib.colors.to_rgb(colour))) < 0.01
    return float(np.mean(np.all(near, axis=-1)))


def test_areas_are_in_proportion_to_bytes_and_seconds(tmp_path: Path) -> None:
    image = draw(timeline(USUAL), tmp_path)
    assert image.shape[:2] == (690, 1200)
    size = {name: (bytes_ / MIB - 30) * seconds for name, seconds, bytes_ in USUAL}
    for name in size:
        ratio = share(image, COLOURS[name]) / share(image, COLOURS[BACKWARD])
        assert ratio == pytest.approx(size[name] / size[BACKWARD], rel=0.1)
    assert share(image, STATE_COLOUR) > share(image, COLOURS[FORWARD])


def test_a_short_peak_is_seen_and_a_short_gap_is_not(tmp_path: Path) -> None:
    def dark(height: slice, between: int) -> int:
        """Columns in which the curve passes through part of the height."""
        parts = [
            (FORWARD, 0.04, 55 * MIB),
            (FORWARD, 1e-7, between * MIB),
            (FORWARD, 0.04, 55 * MIB),
            (BACKWARD, 0.01, 80 * MIB),
        ]
        image = draw(timeline(parts), tmp_path)[height, 90:480]
        return int(np.count_nonzero(np.any(np.all(image < 0.5, axis=-1), axis=0)))

    above, below = slice(210, 260), slice(330, 400)
    assert dark(above, 79) > 0
    assert dark(above, 31) == 0
    assert dark(below, 31) == 0


@pytest.mark.parametrize(
    "data",
    [
        timeline(USUAL, measured=False),
        exhaustive(timeline(USUAL, state=0)),
        exhaustive(timeline([(FORWARD, 1.0, 3)], state=1)),
        exhaustive(timeline([(FORWARD, 1.0, 3 << 40), (BACKWARD, 1.0, 5 << 40)], state=1 << 40)),
        timeline([*USUAL[:2] * 500, *USUAL[2:]]),
    ],
    ids=["schedule", "no state", "three bytes", "terabytes", "1,000 phases"],
)
def test_any_timeline_is_drawn(data: Timeline, tmp_path: Path) -> None:
    image = draw(data, tmp_path)
    assert max(share(image, COLOURS[name]) for name in (FORWARD, BACKWARD)) > 0.01


@pytest.mark.parametrize("title", ["costs $5 and $", "a_b^c", "50 % {x}"])
def test_a_title_is_text(title: str, tmp_path: Path) -> None:
    draw_memory(timeline(USUAL), tmp_path / "title.png", title)
