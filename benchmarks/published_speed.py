"""Published training speeds of GPT-2 124M and the planner's bound, which none may exceed.

    make compilers
    PYTHONPATH=.venv/compilers python benchmarks/published_speed.py

Each is planned with the published rows per device and micro-batches. For models without a recipe in
Replicax, the bound is 100% of the chip's peak. Writes `results/published_speed.json`; see
docs/forecast.md. Exits with 1 if a published speed exceeds its bound.
"""

import dataclasses
import sys
from typing import Any

import jax
from gpu_plans import planned
from timing import environment, save

CONTEXT = 1024


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    target: str
    rows: int
    """Rows per device and step, in `accumulate` micro-batches."""
    accumulate: int
    tokens_per_second: float
    """Published speed of all devices together."""
    source: str


ROWS = (
    Row(
        "llm.c, 8 H100",
        "h100:8",
        64,
        1,
        524_288 / 0.140,
        "KellerJordan/modded-nanogpt records/track_1_short/2024-10-13_llmc: 140 ms for 524,288",
    ),
    Row(
        "llm.c, 8 A100 80 GB",
        "a100-80:8",
        64,
        1,
        10e9 / (90 * 60),
        "karpathy/llm.c discussions/481: 10B tokens in about 90 minutes",
    ),
    Row(
        "modded-nanogpt's baseline, torch.compile, 8 H100",
        "h100:8",
        64,
        1,
        9_536 * 2**19 / (31.4 * 60),
        "KellerJordan/modded-nanogpt records/track_1_short/2024-06-06_AdamW: 9,536 steps of 2^19 "
        "tokens in 31.4 minutes",
    ),
    Row(
        "nanoGPT, 8 A100 40 GB",
        "a100-40:8",
        60,
        5,
        600_000 * 491_520 / (4 * 24 * 3600),
        "karpathy/nanoGPT README.md: 600,000 steps of 491,520 tokens in about 4 days",
    ),
)
OTHER_MODELS = {
    "Levanter, 345M, v3-256": 35.1,
    "Levanter, 750M, v3-256": 38.9,
    "Levanter, 1.4B, v3-256": 41.7,
    "Levanter, 6.7B, v3-256": 47.3,
    "Levanter, 13B, v3-256": 54.4,
    "Levanter, 20B, v3-256": 50.9,
    "MaxText, Llama 2 7B, 8 H100": 49.7,
    "MaxText, 16B, v5e-256": 61.1,
    "MaxText, 32B, v5e-256": 66.9,
    "MaxText, 64B, v5e-256": 59.9,
    "MaxText, 128B, v5e-256": 56.1,
    "MaxText, Llama 3.1 8B, v6e-256": 45.46,
    "MaxText, Llama 3.1 70B, v6e-256": 50.33,
    "MaxText, Llama 2 70B, v5p": 65.4,
}
"""Percent of the chips' peak, excluding recomputation: stanford-crfm/levanter
docs/Levanter-1.0-Release.md, AI-Hypercomputer/maxtext README.md and getting_started pages."""


def told(row: Row) -> dict[str, Any]:
    """Return a row with its bound, as JSON."""
    bound = planned("124m", row.target, row.rows, "shard_map", {}, row.accumulate)
    devices = int(row.target.partition(":")[2])
    best = row.rows * devices * CONTEXT / bound["ms"] * 1e3
    return {
        **dataclasses.asdict(row),
        "bound_tokens_per_second": round(best),
        "of_the_bound": round(row.tokens_per_second / best, 3),
        "bound_mfu": bound["mfu"],
    }


def main() -> None:
    """Plan each row, print the table and save it."""
    jax.config.update("jax_num_cpu_devices", 8)
    rows = [told(row) for row in ROWS]
    print(f"\n{'':50}{'published':>10}{'at best':>9}{'of it':>7}")
    for row in rows:
        speeds = (row["tokens_per_second"], row["bound_tokens_per_second"])
        published, best = (f"{each / 1e6:.2f}M" for each in speeds)
        print(f"{row['name']:50}{published:>10}{best:>9}{row['of_the_bound']:>7.0%}")
    others = {"mfu_percent": OTHER_MODELS, "bound_percent": 100}
    print(f"other models: {max(OTHER_MODELS.values())}% of peak at most")
    result = {"environment": environment(), "rows": rows, "other_models": others}
    print(f"see {save('published_speed', result)}")
    sys.exit(any(row["of_the_bound"] > 1 for row in rows))


if __name__ == "__main__":
    main()
