"""Weak scaling over processes with one core each, as consecutive jobs on this host.

Process counts cannot be measured in one program, so each round launches a job of every count in
turn; a disturbance of a round then affects all of them. Each job runs `bench` as usual.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from replicax.bench.bench_result import Bench, CaseResult, by_mode, with_efficiency
from replicax.bench.cases import STRONG, WEAK, usual_modes
from replicax.bench.machine import Neighbours, check_cores, environment, notes_on_neighbours
from replicax.bench.measurement import Display
from replicax.core.modes.mode_table import MODES
from replicax.errors import ConfigError, did_you_mean
from replicax.text.wording import counted

RUNS_OF_A_JOB = 4
"""Runs of every step in one job; their median is the result of the round."""
Measure = Callable[[int, int], Bench]
"""`measure(processes, round)`: the measurements of a job of that many processes."""


def modes_of_processes() -> list[str]:
    """Return the default modes that run in several processes."""
    return [
        name
        for name in usual_modes()
        if MODES[name].most_devices is None and MODES[name].most_processes is None
    ]


def check_counts(counts: Sequence[int], modes: Sequence[str]) -> tuple[int, ...]:
    """Return `counts` sorted and without duplicates; raise if they or `modes` cannot be run."""
    possible = modes_of_processes()
    for mode in modes:
        if mode not in possible:
            raise ConfigError(
                f"mode {mode!r} with --processes; several processes support {' or '.join(possible)}"
                f"{did_you_mean(mode, possible)}: leave it out"
            )
    ordered = tuple(sorted(set(counts)))
    if ordered[0] < 1:
        raise ConfigError(f"--processes {ordered[0]}; a job has at least 1 process: raise it")
    check_cores(f"--processes {ordered[-1]}", ordered[-1])
    return ordered


def bench_processes(
    measure: Measure,
    counts: Sequence[int],
    *,
    rounds: int,
    notes: Sequence[str] = (),
    progress: bool = True,
) -> Bench:
    """Measure jobs of `counts` processes in turn, `rounds` times, and compare them."""
    started = time.perf_counter()
    measured: dict[int, list[Bench]] = {count: [] for count in counts}
    display, neighbours = Display(progress), Neighbours()
    turns = [(number, count) for number in range(rounds) for count in counts]
    with contextlib.closing(display):
        for place, (number, count) in enumerate(turns):
            text = f"round {number + 1}/{rounds}: {counted(count, 'process')}"
            display.show(text, display.left(place, len(turns)))
            measured[count].append(measure(count, number))
    most = measured[counts[-1]][0]
    return dataclasses.replace(
        most,
        cases=_merged(measured),
        environment=environment(),
        rounds=rounds,
        pinned=True,
        seconds=time.perf_counter() - started,
        notes=(*notes, *notes_on_neighbours(neighbours.cores())),
        scaled_over="processes",
    )


def _merged(measured: Mapping[int, Sequence[Bench]]) -> tuple[CaseResult, ...]:
    """Merge the jobs into one case per mode and count, with one value per round."""
    scaling = WEAK if len(measured) > 1 else STRONG
    merged = [
        dataclasses.replace(_over_rounds(rounds), scalings=(scaling,))
        for parts in measured.values()
        for rounds in zip(*(part.cases for part in parts), strict=True)
    ]
    return with_efficiency(by_mode(merged))


def _over_rounds(cases: Sequence[CaseResult]) -> CaseResult:
    """Merge one case over all rounds, taking the median of the runs in each round."""
    rates = [case.product_flops_per_second for case in cases]
    return dataclasses.replace(
        cases[0],
        seconds_per_step=tuple(statistics.median(case.seconds_per_step) for case in cases),
        rows_per_second=tuple(statistics.median(case.rows_per_second) for case in cases),
        input_wait_fraction=tuple(statistics.median(case.input_wait_fraction) for case in cases),
        product_flops_per_second=max(filter(None, rates), default=None),
    )
