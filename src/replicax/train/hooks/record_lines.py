"""Records as lines of a terminal."""

import textwrap
from collections.abc import Mapping

from replicax.text.table import width
from replicax.train.files.records import Record


def epoch_line(
    epoch: int, epochs: int | None, step: int, trained: list[Record], scored: Record | None
) -> str:
    """Summarize an epoch in 80 columns (with two metrics): last train loss, mean rate."""
    parts = [f"epoch {epoch + 1}/{epochs}" if epochs else f"epoch {epoch + 1} · step {step:,}"]
    if trained:
        parts.append(f"loss {trained[-1].metrics['loss']:.4g}")
    if scored:
        parts.append(f"eval {metrics_text(scored.metrics)}")
    if rate := rows_per_second(trained):
        parts.append(f"{rate:,.0f} rows/s")
    return " · ".join(parts)


def eval_line(record: Record) -> str:
    """Format the metrics of an evaluation in the middle of an epoch."""
    return f"eval   step {record.step:,}: {metrics_text(record.metrics)}"


def skip_line(record: Record) -> str:
    """Report in the terminal's columns that the update of a step was skipped, and its examples."""
    what = "loss spike" if "spike" in record.metrics else "loss or gradient not finite"
    line = f"skip   step {record.step:,}: {what}, examples "
    examples = ", ".join(map(str, record.examples or ()))
    return line + textwrap.shorten(examples, width() - len(line), placeholder=" ...")


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return `loss 0.3964 accuracy 0.8513`; the loss comes first."""
    names = sorted(metrics, key=lambda name: name != "loss")
    return " ".join(f"{name} {metrics[name]:.4g}" for name in names)


def rows_per_second(records: list[Record]) -> float:
    """Return the mean rate of `records` whose time is known, or 0."""
    timed = [record for record in records if record.seconds > 0]
    seconds = sum(record.seconds for record in timed)
    return sum(record.rows for record in timed) / seconds if seconds else 0.0
