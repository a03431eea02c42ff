"""Records -> a picture of the run."""

from collections.abc import Sequence
from pathlib import Path

from replicax.errors import require
from replicax.train.records import Record

# Okabe and Ito's colours, told apart with any kind of colour vision.
TRAIN, EVAL = "#0072B2", "#D55E00"


def draw_curves(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw every metric over the steps, one panel each, and rows per second.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_module = require("matplotlib.figure", "cli")
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    names.sort(key=lambda name: name != "loss")
    panels = len(names) + 1
    figure = figure_module.Figure(figsize=(4.2 * panels, 3.4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis, name in zip(axes, names, strict=False):
        for kind, colour, marker in (("train", TRAIN, None), ("eval", EVAL, "o")):
            points = [
                (record.step, record.metrics[name])
                for record in records
                if record.kind == kind and name in record.metrics
            ]
            if points:
                thin = {"linewidth": 1.2, "markersize": 4}
                axis.plot(
                    *zip(*points, strict=True), color=colour, marker=marker, label=kind, **thin
                )
        axis.set(xlabel="step", ylabel=name)
        axis.legend(frameon=False)
    rates = [(r.step, r.rows_per_second) for r in records if r.kind == "train" and r.seconds > 0]
    if rates:
        axes[-1].plot(*zip(*rates, strict=True), color=TRAIN, linewidth=1.2)
    axes[-1].set(xlabel="step", ylabel="rows per second")
    axes[-1].set_ylim(bottom=0)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
