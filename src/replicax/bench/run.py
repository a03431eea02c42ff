"""`bench`: one training step in every mode on every device count, side by side."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import optax

from replicax.bench.bench_result import Bench
from replicax.bench.cases import (
    BenchCase,
    all_cases,
    check_devices,
    check_left,
    default_devices,
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
from replicax.core.data_parallel import DataParallel
from replicax.core.exact import MICRO_SHARDS
from replicax.core.job import Alone, Job
from replicax.core.layout import Layout
from replicax.core.mesh import make_mesh
from replicax.core.modes import as_mode
from replicax.core.objective import LossFunction
from replicax.core.own import StepFunction
from replicax.core.partition import Rules
from replicax.core.reduction import Reduction
from replicax.errors import ConfigError


def bench(
    loss: LossFunction | None,
    optimizer: optax.GradientTransformation | None,
    model: Any,
    source: Any,
    *,
    batch_size: int,
    step: StepFunction | None = None,
    devices: Sequence[int] | None = None,
    modes: Sequence[str] | None = None,
    layout: str | Rules | Layout = "replicated",
    layouts: Sequence[Arrangement] | None = None,
    accumulate: int = 1,
    micro_shards: int = MICRO_SHARDS,
    precision: str = "float32",
    reduction: str | Reduction = "float32",
    rounds: int = 5,
    pin: bool = False,
    seed: int = 0,
    job: Job | None = None,
    tokens_per_row: int | None = None,
    progress: bool = True,
) -> Bench:
    """Measure one training step in every mode on every device count, side by side.

    Two scalings: strong has `batch_size` rows on every count; weak has the same rows on every
    device, `batch_size` in all on the most of them. Each round runs every step for about a quarter
    of a second, in an order of its own; input is part of it. In a job of several processes all call
    this, and all of their devices are measured.

    On host devices call `replicax.train.host_memory.keep_freed_memory()` before, as
    `replicax train` does, or the allocator is a part of what is measured.

    Examples:
        >>> result = rx.bench(loss, optimizer, model, source, batch_size=32, devices=[1, 2],
        ...                   modes=["jit"], rounds=1)
        >>> table = str(result)

    Args:
        loss: as for `DataParallel`.
        optimizer: as for `DataParallel`.
        model: as for `DataParallel.init`.
        source: as for `DataParallel.feed`, but it must be readable again and again.
        batch_size: rows of a global batch.
        step: as for `DataParallel`, with None for `loss` and `optimizer`.
        devices: counts; by default the powers of two up to all attached devices, and these. In a
            job of several processes only all of them.
        modes: names of `replicax.core.modes.MODES`; by default all whose bits are not fixed.
        layout: as for `DataParallel`. A mode that cannot hold it is left out, with a note.
        layouts: several to compare, by default in mode `jit` on all devices and on one:
            `replicated`, `zero1`, `fsdp`, and with the rules of `layout` `model` and `stages`,
            which take the most devices along that axis that divide its dims; or pairs of a layout
            and `mesh(devices)`. What cannot be run is left out, with a note.
        accumulate: as for `DataParallel`.
        micro_shards: as for `DataParallel`.
        precision: as for `DataParallel`.
        reduction: as for `DataParallel`. A mode that cannot take it is left out, with a note.
        rounds: at least 1.
        pin: whether a host device has one processor core to itself; without it one device uses all
            of them, and a second one adds nothing.
        seed: of the initial state, the order of the rows, and that of the cases in a round.
        job: as for `DataParallel`.
        tokens_per_row: where throughput is wanted in tokens, too.
        progress: whether to print what is going on.

    Raises:
        ConfigError: arguments that cannot work, a batch too small for the devices among them.
        LossError: see `DataParallel.step`.
    """
    job = Alone() if job is None else job
    attached = jax.devices()
    platform = attached[0].platform
    if modes is None:
        modes = usual_modes() if layouts is None else MODES_BY_DEFAULT
    for name, value in (("rounds", rounds), ("tokens_per_row", tokens_per_row)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}; it is at least 1: raise it")
    for mode in modes:
        as_mode(mode)
    lone = jax.process_count() == 1
    if devices is None:
        every = lone and layouts is None
        devices = default_devices(len(attached)) if every else [len(attached)]
    counts = check_devices(devices, len(attached), platform)
    if not lone:
        _check_job(counts, pin)
    if layouts is not None and lone:
        counts = tuple(sorted({1, *counts}))
    if pin and platform != "cpu":
        raise ConfigError(
            f"pin with {platform} devices; only host devices share cores: leave pin out"
        )
    if pin:
        check_cores(f"pin with {max(counts)} devices", max(counts))

    def data_parallel(case: BenchCase) -> DataParallel:
        placed = case.placed
        return DataParallel(
            loss,
            optimizer,
            step=step,
            mesh=placed.mesh if placed else make_mesh(case.devices, devices=attached),
            mode=case.mode,
            layout=placed.layout if placed else layout,
            accumulate=accumulate,
            micro_shards=micro_shards,
            precision=precision,
            reduction=reduction,
            job=job,
        )

    def check(case: BenchCase) -> None:
        """Raise `ConfigError` where the step of `case` cannot be, without compiling it."""
        dp = data_parallel(case)
        dp.abstract_state(model)
        dp.split.padded(case.global_batch)

    can_be_cut = check_source(source, batch_size, job)
    if layouts is not None:
        cases, notes = cases_of_layouts(layouts, modes, counts, batch_size, layout, check)
    else:
        kept, notes = possible_modes(modes, counts, layout, reduction)
        cases = all_cases(batch_size, counts, kept, weak=can_be_cut)
    notes += notes_on_cases(batch_size, cases, accumulate)
    if layouts is None and not can_be_cut and len(counts) > 1:
        notes.append(
            "no weak scaling: the source gives whole batches, which cannot be cut to other sizes"
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
        device_kind=attached[0].device_kind,
        parameters=sum(leaf.size for leaf in params),
        parameter_bytes=sum(leaf.nbytes for leaf in params),
        batch_size=batch_size,
        layout=", ".join(placed) if layouts else names["layout"],
        accumulate=accumulate,
        precision=precision,
        rounds=rounds,
        pinned=pin,
        seed=seed,
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        reduction=names["reduction"],
    )


def _check_job(counts: Sequence[int], pin: bool) -> None:
    """Raise `ConfigError` for what several processes cannot do."""
    processes, attached = jax.process_count(), jax.device_count()
    if counts != (attached,):
        raise ConfigError(
            f"devices={','.join(map(str, counts))} in {processes} processes with {attached} "
            "devices; all processes take part in every step: leave devices out"
        )
    if pin:
        raise ConfigError(
            f"pin in {processes} processes; what starts them gives them cores: use replicax "
            "launch --pin"
        )
