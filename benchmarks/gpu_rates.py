"""The table of measured rates that `replicax plan` reads, from the figures of `gpu_ceilings.py`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "replicax" / "analysis" / "measured_rates.json"


def rates(
    source: str, figures: Mapping[str, float], products: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return the entry of a chip, in FLOP/s and bytes per second."""
    forward, both = (
        figures[f"attention, {passes} (cuDNN), TFLOP/s"] for passes in ("forward", "both ways")
    )
    return {
        "source": source,
        "copy": 1e12 * figures["copy, read and written, TB/s"],
        "products": [
            [*dims, 1e12 * figures[f"product, {name}, TFLOP/s"]] for name, dims in products.items()
        ],
        # Both ways take 2 and 5 products: what is left of their time is the backward pass's.
        "attention": {"forward": 1e12 * forward, "backward": 5e12 / (7 / both - 2 / forward)},
    }


def write(chip: str, entry: Mapping[str, Any], table: Path = TABLE) -> None:
    """Put the entry of a chip in the table."""
    known = json.loads(table.read_text(encoding="utf-8")) | {chip: entry}
    table.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
