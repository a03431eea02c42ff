"""Forecast the goodput of three strategies by the number of devices, and compare with published.

The comparison is `tests/support/published_goodput.py`, the table `replicax plan --failures` at its
defaults. Nothing is measured here. Writes `results/failures.json`; see `docs/failures.md`.
"""

import sys
from pathlib import Path
from typing import Any

from timing import environment, save

from replicax.plan.failures import Failures, goodput_forecast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.published_goodput import ROWS

DEVICES = 2, 8, 64, 1000, 100_000


def by_devices() -> list[dict[str, Any]]:
    """Return the forecast for each number of devices."""
    found = []
    for devices in DEVICES:
        each = goodput_forecast(Failures(devices=devices))
        found.append(
            {
                "devices": devices,
                "islands": each.failures.island_count,
                "mtbf_seconds": each.mtbf_seconds,
                "goodput": {one.strategy: round(one.goodput, 4) for one in each.strategies},
                "recommended": each.recommended,
            }
        )
    return found


def main() -> None:
    """Print both tables and save them."""
    table = by_devices()
    for line in table:
        shares = " ".join(f"{share:8.1%}" for share in line["goodput"].values())
        print(f"{line['devices']:>8,} devices {shares}  {line['recommended']}")
    rows = []
    for row in ROWS:
        mark = " (solved)" if row.solved else ""
        print(f"{row.name:72}{row.published:>7.1%}{row.forecast:>7.1%}{row.error:>+6.1f}{mark}")
        rows.append({**vars(row), "error_points": round(row.error, 1)})
    result = {"by_devices": table, "published": rows, "environment": environment()}
    print(f"written to {save('failures', result)}")


if __name__ == "__main__":
    main()
