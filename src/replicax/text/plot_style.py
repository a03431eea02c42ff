"""Look of all plots: no background, and colours that are read on white and on dark pages alike."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from replicax.errors import require

INK = "#7F7F7F"
"""Text, axes and lines: a contrast of 4 to 1 with white, and with the dark pages of the docs."""
ON_COLOUR = "#101010"
"""Text on an area that is filled."""
PALETTE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
"""Okabe and Ito's colours, distinguishable with any kind of colour vision, but black and yellow,
which one of the two pages would hide."""
_STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.facecolor": "none",
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


@contextlib.contextmanager
def picture(file: Path | IO[bytes], width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure of `width` x `height` inches, and write it as PNG of 150 dots an inch.

    The file is written when the block ends without an error; what is drawn in it has this style:

        with picture(folder / "loss.png", 6, 4) as figure:
            figure.subplots().plot(steps, losses, color=PALETTE[0])

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_class = require("matplotlib.figure", "cli").Figure
    # Ticks are made when they are drawn, and take their colour then.
    with require("matplotlib", "cli").rc_context(_STYLE):
        figure = figure_class(figsize=(width, height))
        yield figure
        figure.savefig(file, format="png", dpi=150)
