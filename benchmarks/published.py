"""Compare the forecast of a data-parallel step with published scaling figures.

For every row of `tests/support/published_rows.py`, forecasts the efficiency at the larger scale,
relative to the smallest published scale, from public parameters only. Nothing is measured or
fitted here.

Goal: a mean error of at most 10 points. Writes `results/published.json`; see `docs/forecast.md`.
"""

import sys
from pathlib import Path
from typing import Any

from timing import environment, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.published_rows import ROWS, Row, mean_error


def told(row: Row) -> dict[str, Any]:
    """Return a row's JSON; efficiencies in percent, errors in points."""
    step = row.step(row.devices)
    return {
        "name": row.name,
        "published": round(100 * row.published, 1),
        "forecast": round(100 * row.forecast, 1),
        "error": round(row.error, 1),
        "chosen_beforehand": row.chosen,
        "all_parameters_public": row.complete,
        "compute_seconds": step.compute_seconds,
        "communication_seconds": step.communication_seconds,
        "exposed_seconds": step.exposed_seconds,
        "source": row.source,
        "parameters": row.parameters,
    }


def means() -> dict[str, float]:
    """Return the mean absolute errors in points."""
    chosen = [row for row in ROWS if row.chosen]
    groups = {
        "chosen_beforehand_all_parameters_public": [row for row in chosen if row.complete],
        "chosen_beforehand": chosen,
        "all_parameters_public": [row for row in ROWS if row.complete],
        "all": list(ROWS),
    }
    return {name: round(mean_error(rows), 1) for name, rows in groups.items()}


def main() -> None:
    """Print the table and save it."""
    print(f"{'':46}{'published':>11}{'forecast':>11}{'error':>9}")
    for row in ROWS:
        mark = "" if row.complete else " *"
        numbers = f"{row.published:>11.1%}{row.forecast:>11.1%}{row.error:>+9.1f}"
        print(f"{row.name + mark:46}{numbers}")
    print("* some parameters of this run are not public and were substituted\n")
    for name, points in means().items():
        print(f"mean error, {name.replace('_', ' ')}: {points}")
    rows = [told(row) for row in ROWS]
    path = save("published", {"rows": rows, "mean_error": means(), "environment": environment()})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
