"""How far apart the processes' clocks are."""

import statistics
import time
from collections.abc import Sequence

from replicax.cluster.differences import processes_text
from replicax.core.job import Job
from replicax.doctor.row import OK, SKIPPED, WARNING, Row

CHECK = "clocks"
MOST_SECONDS = 1.0
_ROUNDS = 8

Reading = tuple[float, float]
"""The clock just after the others were heard, and how long that took before; in seconds."""


def check_clocks(job: Job) -> list[Row]:
    """The clocks of all processes against process 0's. All processes call it."""
    if job.processes == 1:
        return [Row(CHECK, "one process: one clock", SKIPPED)]
    reading: Reading = (time.time(), 0.0)
    rounds: list[list[Reading]] = []
    for _ in range(_ROUNDS + 1):
        started = time.monotonic()
        rounds.append([tuple(each) for each in job.gather("the doctor's clocks", reading)])
        reading = (time.time(), time.monotonic() - started)
    return judge_clocks(rounds[1:])  # before the first, they had heard of nothing together


def judge_clocks(rounds: Sequence[Sequence[Reading]]) -> list[Row]:
    """Each process's clock minus process 0's, known to within the shortest round trip.

    Args:
        rounds: the readings of all processes, taken as they heard that all had come.
    """
    ahead, bounds = [0.0], [0.0]
    for process in range(1, len(rounds[0])):
        ahead.append(statistics.median(each[process][0] - each[0][0] for each in rounds))
        bounds.append(min(max(each[process][1], each[0][1]) for each in rounds))
    spread, bound = max(ahead) - min(ahead), max(bounds)
    found = f"within {_text(spread)} of each other, ± {_text(bound)}"
    figures = {"seconds_ahead_of_process_0": ahead, "within_seconds": bounds}
    if spread - bound <= MOST_SECONDS:
        return [Row(CHECK, found, OK, figures=figures)]
    middle = statistics.median(ahead)
    off = [n for n, seconds in enumerate(ahead) if abs(seconds - middle) > MOST_SECONDS / 2]
    return [
        Row(
            CHECK,
            f"{found}, {processes_text(off)} farthest off: times in logs and checkpoints mislead",
            WARNING,
            "synchronise the hosts' clocks (chrony, systemd-timesyncd)",
            figures,
        )
    ]


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
