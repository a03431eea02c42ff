"""Published goodput under failures, and the same by `plan`'s formulas from published parameters.

Rates that were counted by the clock include the stops: the time of computing between failures is
that between them less the stop. Assumptions are in `assumed`; a figure from which a parameter is
solved is marked, and no other.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from replicax.plan.failures import islands_goodput, kept, restarted, save_interval

YEAR = 365 * 24 * 3600.0
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class GoodputRow:
    """A published or measured goodput, as a share."""

    name: str
    published: float
    forecast: float
    source: str
    assumed: str
    solved: bool = False
    """Whether a parameter is solved from this figure, which then proves nothing."""
    least: bool = False
    """Whether the figure is published as a lower limit."""

    @property
    def error(self) -> float:
        """Points by which the forecast is too high."""
        error = 100 * (self.forecast - self.published)
        return min(0.0, error) if self.least else error


def _decoupled() -> list[GoodputRow]:
    source = "arXiv 2604.21428 (figures), Gemini 2.5 report, arXiv 2507.06261 (times)"
    assumed = (
        "a chip fails once a year (published); a slice is removed in 20 s (published: tens of "
        "seconds), at 97% of the throughput while it is away (published)"
    )
    pause, running = 20.0, 0.97
    rows = [
        GoodputRow(
            f"Decoupled DiLoCo, {chips / 1e6:g}M chips, {_learners(learners)}",
            published,
            running * islands_goodput(YEAR * learners / chips, 1, 0.0, pause),
            source,
            assumed,
        )
        for chips, learners, published in (
            (1.2e6, 1, 0.58),
            (1.2e6, 2, 0.70),
            (1.2e6, 4, 0.82),
            (1.2e6, 8, 0.88),
            (1.2e6, 16, 0.93),
            (2.4e6, 1, 0.40),
            (2.4e6, 8, 0.80),
            (2.4e6, 16, 0.86),
        )
    ]
    waits = YEAR / 1.2e6 * (1 / 0.27 - 1)
    plain = f"all wait for the failed chips: {waits:.0f} s, solved from the figure of 1.2M chips"
    return [
        *(
            GoodputRow(
                f"Decoupled DiLoCo, {chips / 1e6:g}M chips, plain",
                published,
                restarted(YEAR / chips, waits, 0.0, 0.0),
                "arXiv 2604.21428",
                plain,
                solved=chips == 1.2e6,
            )
            for chips, published in ((1.2e6, 0.27), (2.4e6, 0.18))
        ),
        *rows,
    ]


def _learners(count: int) -> str:
    return "elastic" if count == 1 else f"{count} learners"


def _published() -> list[GoodputRow]:
    stop, save = 600.0, 6.48e12 / 2e12  # 405e9 parameters of 16 bytes, 2 TB/s sustained
    between = 54 * 24 * 3600 / 419 - stop
    large = 18 * 60.0
    kills = 1800 / 28
    return [
        GoodputRow(
            "Llama 3 405B, 16,384 GPUs",
            0.90,
            restarted(between, stop, save, save_interval(save, between)),
            "arXiv 2407.21783: 419 stops in 54 days, 2 TB/s to the storage",
            "a stop of 10 min, as of Meta's synchronous job in arXiv 2602.00277",
            least=True,
        ),
        GoodputRow(
            "Meta, 98,304 GPUs, synchronous",
            0.44,
            restarted(large - stop, stop, save, save_interval(save, large - stop)),
            "arXiv 2602.00277: a failure every 18 min, 10 min to recover",
            "checkpoints as of Llama 3",
        ),
        GoodputRow(
            "Meta, 98,304 GPUs, FT-HSDP (islands, every step)",
            0.80,
            islands_goodput(large - 180, 12, 600.0, 180.0),
            "arXiv 2602.00277: 12 replicas, a stall of 3 min",
            "a replica is away for the 10 min of a synchronous recovery",
        ),
        GoodputRow(
            "torchft, 30 islands, a failure every 60 s: step efficiency",
            0.823,
            islands_goodput(60 - 10.9, 30, 0.0, 10.9),
            "PyTorch blog, 2025-06-20: 10.9 s a step; the step of a failure is discarded",
            "none",
        ),
        GoodputRow(
            "ft-diloco, 32 islands, 125 faults an hour: commits of the survivors",
            0.977,
            islands_goodput(3600 / 125, 32, 0.0),
            "ft-diloco README: H = 20",
            "survivors do not wait",
        ),
        GoodputRow(
            "ft-diloco, 32 islands, 28 kills in 30 min: islands alive",
            30 / 32,
            islands_goodput(kills, 32, 149.0),
            "ft-diloco README: about 30 of 32 alive, a victim is back in 149 s",
            "none",
        ),
    ]


def _measured() -> list[GoodputRow]:
    """Return the rows of benchmarks/results/islands_goodput.json."""
    found = json.loads((RESULTS / "islands_goodput.json").read_text())
    interval = found["settings"]["save_seconds"]
    rows = []
    for kind in ("islands", "restart"):
        for run in found[kind]:
            if not run["kills"]:
                continue
            stops = run["seconds_between_kill_and_step"]
            stop = sum(stops) / len(stops)
            mtbf = run["seconds"] / run["kills"] - stop
            goodput = islands_goodput(mtbf, 3, 0.0, stop)
            assumed = "an absent island leaves its cores to the others"
            if kind == "restart":
                goodput, assumed = mtbf / (mtbf + stop) * kept(mtbf, 0.0, interval), "none"
            rate = run["faults_per_hour"]
            rows.append(
                GoodputRow(
                    f"here, 3 processes, {rate:g} faults an hour, {kind}",
                    run["goodput"],
                    goodput,
                    "benchmarks/results/islands_goodput.json: kills, stops, 10 s between saves",
                    assumed,
                )
            )
    return rows


ROWS: tuple[GoodputRow, ...] = (*_decoupled(), *_published(), *_measured())
