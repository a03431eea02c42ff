"""`bench`: compare a training step in every mode on every device count."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax

import replicax.bench.report  # noqa: F401 - how a benchmark is printed and shown
from replicax.bench.bench_result import Bench
from replicax.bench.cases import (
    BenchCase,
    all_cases,
    check_left,
    default_devices,
    device_counts,
    notes_on_cases,
    possible_modes,
    usual_modes,
)
from replicax.bench.layouts import MODES_BY_DEFAULT, Arrangement, cases_of_layouts
from replicax.bench.machine import (
    Neighbours,
    check_cores,
    environment,
    notes_on_machine,
    notes_on_neighbours,
    own_cores,
)
from replicax.bench.measurement import Display, Measurement
from replicax.bench.runner import check_source
from replicax.core.data.per_row import has_rows
from replicax.core.data_parallel import DataParallel
from replicax.core.modes.mode_table import MODES, ModeName, as_mode
from replicax.core.placement.mesh import make_mesh
from replicax.errors import ConfigError
from replicax.text.arguments import Count, Int32Count, Seed, typed


@typed
def bench(
    dp: DataParallel,
    model: Any,
    source: Any,
    *,
    batch_size: Int32Count,
    devices: Sequence[int] | None = None,
    modes: Sequence[ModeName] | None = None,
    layouts: Sequence[Arrangement] | None = None,
    rounds: Count = 5,
    pin: bool = False,
    seed: Seed = 0,
    tokens_per_row: Count | None = None,
    progress: bool = True,
) -> Bench:
    """Benchmark the step of `dp` in every mode on every device count.

    Strong scaling has `batch_size` rows on every device count; weak scaling has the same rows per
    device, with `batch_size` in total on the largest count. Each round runs every step for about a
    quarter of a second, input included, in random order. In a job of several processes, all
    processes must call this, and all their devices are measured.

    On CPU devices, call `replicax.train.run.host_memory.keep_freed_memory()` first, as
    `replicax train` does; otherwise the allocator affects the measurement.

    Examples:
        >>> result = rx.bench(dp, model, source, batch_size=32, devices=[1, 2], modes=["jit"],
        ...                   rounds=1)
        >>> table = str(result)

    Args:
        dp: the step. Copies are measured, with other modes and meshes, and otherwise configured
            alike; modes that do not support its layout or reduction are skipped, with a note.
        model: as for `dp.init`.
        source: as for `dp.feed`, but it must be iterable repeatedly.
        batch_size: rows of a global batch.
        devices: device counts; by default powers of two up to the number of attached devices, and
            that number. A job of several processes always uses all devices.
        modes: names of `replicax.core.modes.mode_table.MODES`; by default all that are not bitwise,
            and that of `dp`.
        layouts: layouts to compare, by default in mode `jit` on all devices and on one:
            `replicated`, `zero1`, `fsdp`; with the rules of `dp`'s layout also `model` and
            `stages`, which use the most devices along that axis that divide its dims; or pairs of a
            layout and `mesh(devices)`. Layouts that cannot be run are skipped, with a note.
        rounds: at least 1.
        pin: whether to give each CPU device its own core; otherwise one device uses all cores, and
            a second one adds nothing.
        seed: for the initial state, the order of the rows, and the order of cases in a round.
        tokens_per_row: if given, throughput is also reported in tokens.
        progress: whether to print progress.

    Raises:
        ConfigError: invalid arguments, such as a batch too small for the devices.
        LossError: see `DataParallel.step`.
    """
    layout, job = dp.layout, dp.job
    platform, lone = jax.devices()[0].platform, jax.process_count() == 1
    chosen = _modes(modes, layouts, dp)
    counts = _device_counts(devices, layouts, pin)

    def data_parallel(case: BenchCase) -> DataParallel:
        placed = case.placed
        return dp.replace(
            mesh=placed.mesh if placed else make_mesh(case.devices, devices=jax.devices()),
            mode=case.mode,
            layout=placed.layout if placed else layout,
        )

    def check(case: BenchCase) -> None:
        """Raise `ConfigError` if the step of `case` is invalid, without compiling it."""
        other = data_parallel(case)
        other.abstract_state(model)
        other.split.padded(case.global_batch)

    resizable = check_source(source, batch_size, job) and not has_rows(model)
    if layouts is not None:
        cases, notes = cases_of_layouts(layouts, chosen, counts, batch_size, layout, check)
    else:
        possible, notes = possible_modes(chosen, counts, layout, dp.reduction)
        cases = all_cases(batch_size, counts, possible, weak=resizable)
    notes += [*notes_on_cases(batch_size, cases, dp.accumulate), *_notes_on_modes(cases)]
    if layouts is None and not resizable and len(counts) > 1:
        notes.append(
            "no weak scaling: the source yields whole batches, or the state has rows of one, which "
            "cannot be resized"
        )
    if lone:
        notes += notes_on_machine(max(counts), platform, pin)

    started = time.perf_counter()
    cores = own_cores() if pin else []
    measurement = Measurement(data_parallel, model, source, seed, cores, Display(progress))
    with contextlib.closing(measurement):
        notes += measurement.prepare(cases, rounds)
        check_left(measurement.runners, notes)
        rates = measurement.product_rates() if platform == "cpu" else {}
        neighbours = Neighbours()
        measurement.measure(rounds)
        if platform == "cpu" and lone:
            notes += notes_on_neighbours(neighbours.cores())
    names = measurement.runners[0].dp.configuration.names()
    params = jax.tree.leaves(next(iter(measurement.states.values())).params)
    placed = dict.fromkeys(str(runner.case.placed) for runner in measurement.runners)
    return Bench(
        cases=measurement.results(rates, tokens_per_row),
        environment=environment(),
        platform=platform,
        device_kind=jax.devices()[0].device_kind,
        parameters=sum(leaf.size for leaf in params),
        parameter_bytes=sum(leaf.nbytes for leaf in params),
        batch_size=batch_size,
        layout=", ".join(placed) if layouts else names["layout"],
        accumulate=dp.accumulate,
        precision=dp.precision.name,
        rounds=rounds,
        pinned=pin,
        seed=seed,
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        reduction=names["reduction"],
    )


def _modes(
    modes: Sequence[str] | None, layouts: Sequence[Arrangement] | None, dp: DataParallel
) -> Sequence[str]:
    """Return the modes to measure; raise `ConfigError` for an unknown one."""
    if modes is None:
        current = [dp.mode.name] if dp.mode.name in MODES else []
        modes = [*usual_modes(), *current] if layouts is None else MODES_BY_DEFAULT
    for mode in modes:
        as_mode(mode)
    return modes


def _device_counts(
    devices: Sequence[int] | None, layouts: Sequence[Arrangement] | None, pin: bool
) -> tuple[int, ...]:
    """Return the device counts to measure; raise `ConfigError` if one cannot be measured."""
    attached, platform = jax.device_count(), jax.devices()[0].platform
    processes = jax.process_count()
    if devices is None:
        every = processes == 1 and layouts is None
        devices = default_devices(attached) if every else [attached]
    counts = device_counts(devices, attached, platform)
    if processes > 1 and counts != (attached,):
        raise ConfigError(
            f"devices={','.join(map(str, counts))} in {processes} processes with {attached} "
            "devices; every step runs on all processes: leave devices out"
        )
    if processes > 1 and pin:
        raise ConfigError(
            f"pin in {processes} processes; their launcher assigns cores: use replicax launch --pin"
        )
    if processes == 1 and layouts is not None:
        counts = tuple(sorted({1, *counts}))
    if pin and platform != "cpu":
        raise ConfigError(
            f"pin with {platform} devices; only CPU devices share cores: leave pin out"
        )
    if pin:
        check_cores(f"pin with {max(counts)} devices", max(counts))
    return counts


def _notes_on_modes(cases: Sequence[BenchCase]) -> list[str]:
    """Return a note for each mode whose analysed step is not the one that runs."""
    analysed = {case.mode: MODES[case.mode].analysed for case in cases}
    text = "mode {}: memory, work and traffic are those of the step {}"
    return [text.format(mode, step) for mode, step in analysed.items() if step]
