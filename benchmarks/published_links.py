"""Compare `plan`'s bandwidths for a compute utilization with two published tables.

For every cell of table 4 of arXiv 2501.18512 and of table 6 of arXiv 2503.09799 (see
`tests/support/published_links.py`), computes the bandwidth by the formula of `plan --network`, and
how many steps of the tables' grid lie between. Nothing is measured or fitted here. Writes
`results/published_links.json`; see `docs/plan.md`.
"""

import collections
import sys
from pathlib import Path

from timing import environment, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.published_links import TABLE_4, TABLE_6, UTILIZATIONS


def main() -> None:
    """Print the cells and save them."""
    rows, summary = [], {}
    for table in (TABLE_4, TABLE_6):
        apart: collections.Counter[int] = collections.Counter()
        for row in table:
            own = [round(row.required(share), 2) for share in UTILIZATIONS]
            steps = row.steps_apart()
            apart.update(steps)
            rows.append(
                {
                    "source": row.source,
                    "model": row.model,
                    "method": row.method,
                    "published_gigabits_per_second": row.gigabits_per_second,
                    "forecast_gigabits_per_second": own,
                    "grid_steps": steps,
                }
            )
            print(f"{row.model:18}{row.method:28}{own} {steps}")
        summary[table[0].source] = {str(steps): apart[steps] for steps in sorted(apart)}
        print(f"{table[0].source}: cells by grid steps {summary[table[0].source]}\n")
    result = {"rows": rows, "cells_by_grid_steps": summary, "environment": environment()}
    print(f"written to {save('published_links', result)}")


if __name__ == "__main__":
    main()
