"""Implement `verify_program`: compare a step on many devices with the same step on one."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from replicax.analysis.compiled import inspect
from replicax.checks import NOTE, SKIP, Check
from replicax.core.data.batch import row_count, values_of_sets
from replicax.core.data_parallel import DataParallel
from replicax.core.modes import MODES, Mode, as_mode
from replicax.core.placement.mesh import replica_count
from replicax.errors import ConfigError
from replicax.verify.devices_asked import check_devices_asked
from replicax.verify.exactness import (
    bits_of_islands,
    bits_on,
    check_exactness,
    check_simulated_islands,
    replica_counts,
)
from replicax.verify.facts import examine_subject
from replicax.verify.independence import DEPENDENT
from replicax.verify.program_cases import NOT_REPEATABLE, ProgramCases
from replicax.verify.round_checks import check_rounds
from replicax.verify.subject import Case, Subject
from replicax.verify.sums import Elsewhere, check_sums, with_sums_as_cause
from replicax.verify.traffic import check_traffic, check_work, read_programs
from replicax.verify.verification import Verification, failed_on_one_device
from replicax.verify.verify_custom_step import verify_custom_step

MICRO_BATCHES_TRIED = 4
ROWS_OF_ONE = 2
"""Rows per micro-batch of a replica; more would show nothing new."""
Show = Callable[[str], None]


def verify_program(
    dp: DataParallel,
    model: Any,
    batch: Any,
    *,
    modes: Sequence[str | Mode] | None = None,
    micro_batches: int = MICRO_BATCHES_TRIED,
    batch_size: int | None = None,
    elsewhere: Elsewhere | None = None,
    seed: int = 0,
    show: Show | None = None,
) -> Verification:
    """Implement `replicax.verified.verify`; `elsewhere` is the target's compiler."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"verify on {jax.process_count()} processes; it reads every device's copies and must "
            "run in one process: start it alone, with simulated CPU devices"
        )
    started = time.monotonic()
    chosen = _modes(dp, modes)
    if values_of_sets(batch):
        raise ConfigError(
            "verify was given a batch with an rx.RowSet, which it does not cut: compare dp.step "
            "with mode='single', or verify a step without the set"
        )
    rows = _rows(dp, row_count(batch), micro_batches)
    batch = jax.tree.map(lambda leaf: leaf[:rows], batch)
    about = {
        **dp.configuration.names(),
        "devices": int(dp.mesh.devices.size),
        "replicas": replica_count(dp.mesh),
        "platform": dp.mesh.devices.flat[0].platform,
        "modes": [mode.name for mode in chosen],
        "micro_batches": micro_batches,
        "rows": rows,
    }
    show = show or (lambda text: None)
    checks = list[Check]()
    if dp.configuration.islands is not None:
        checks = list(check_rounds(dp, model, batch, seed, show))
    if dp.configuration.arguments.islands is not None:
        dp = dp.replace(islands=None)  # the rest is about the steps of an island
    look = verify_custom_step
    if dp.configuration.step is None:
        look = partial(_checks, chosen=modes is not None)
    checks += list(look(dp, model, batch, chosen, micro_batches, seed, show))
    show("sums")
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (batch_size or rows, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)
        ),
        batch,
    )
    sums = list(check_sums(dp, model, shapes, elsewhere))
    checks = with_sums_as_cause(checks, sums)
    return Verification(checks, {**about, "seconds": round(time.monotonic() - started, 1)})


def rows_needed(dp: DataParallel, micro_batches: int = MICRO_BATCHES_TRIED) -> int:
    """Return the rows of the smallest batch that exercises every check."""
    shards = max(replica_count(dp.mesh) * max(micro_batches, dp.accumulate), dp.micro_shards)
    return shards * ROWS_OF_ONE


def _checks(
    dp: DataParallel,
    model: Any,
    batch: Any,
    modes: Sequence[Mode],
    micro_batches: int,
    seed: int,
    show: Show,
    *,
    chosen: bool,
) -> Iterator[Check]:
    show("one device")
    try:
        subject = Subject(dp, model, batch, micro_batches, seed)
        facts = examine_subject(subject)
    except Exception as error:  # the user's loss
        yield failed_on_one_device(error)
        return
    own = subject.own
    depends = facts.rows.kind == DEPENDENT
    splits = own.mode.per_replica or own.micro_batches > 1
    yield facts.rows.check(fails=depends and splits)
    if facts.constant_key and not facts.rows.positional:
        yield Check("parity", "random numbers", NOTE, DRAWN_FROM_A_CONSTANT)
    yield from check_devices_asked(facts.asked)
    cases = _cases(subject, modes)
    cases_of = ProgramCases(subject, facts, show)
    show("compilation")
    subject.compile_ahead(cases)
    for case in cases:
        yield from cases_of.parity(case)
    for mode in modes:
        if mode.bitwise and facts.repeatable:
            bits = partial(bits_on, subject, facts, mode)
            counts, is_own = replica_counts(dp), own.mode == mode
            # Unless it is the training mode or requested, one device and all of them suffice.
            counts = counts if is_own or chosen else sorted({counts[0], counts[-1]})
            yield check_exactness(mode, counts, bits, is_own, show)
            if is_own or chosen:
                show(f"parity: bits of {mode} on islands")
                yield check_simulated_islands(
                    mode, partial(bits_of_islands, subject, facts, mode), is_own
                )
        elif mode.bitwise:
            yield Check("parity", str(mode), SKIP, NOT_REPEATABLE)
    try:
        cases_of.trial(own).run([subject.full])
    except Exception:  # reported by parity
        return
    show("traffic")
    programs = read_programs(subject, cases, show)
    yield from check_traffic(subject, facts, programs)
    single = inspect(subject.compiled(subject.single, subject.full))
    yield from check_work(subject, programs, single)
    yield from cases_of.topics([case for case in cases if case in programs])


DRAWN_FROM_A_CONSTANT = (
    "some do not depend on the loss's key: they are the same in every step, on every replica"
)


def _cases(subject: Subject, modes: Sequence[Mode]) -> list[Case]:
    """Return the modes with one and several micro-batches, without redundant combinations.

    Rows are split into micro-batches inside the mapped function, so the first mode of each view
    (global or per replica) covers the others.
    """
    cases = []
    for mode in modes:
        first = next(each for each in modes if each.per_replica == mode.per_replica) == mode
        shown = first or mode == subject.own.mode
        counts = subject.micro_batches if shown and not mode.bitwise else [1]
        cases += [subject.case(mode, count) for count in counts]
    if subject.own not in cases:
        cases.append(subject.own)
    return cases


def _modes(dp: DataParallel, modes: Sequence[str | Mode] | None) -> list[Mode]:
    """Return the chosen modes; by default all multi-device modes and the step's own."""
    if modes is None:
        return [mode for mode in MODES.values() if mode.most_devices != 1 or mode == dp.mode]
    return list(dict.fromkeys(map(as_mode, modes)))


def _rows(dp: DataParallel, rows: int, micro_batches: int) -> int:
    """Return the largest number of rows that divides in every case."""
    replicas = replica_count(dp.mesh)
    unit = math.lcm(replicas * micro_batches, replicas * dp.accumulate, dp.micro_shards)
    if rows < unit:
        raise ConfigError(
            f"verify was given {rows} rows; {replicas} replicas with {micro_batches} and "
            f"{dp.accumulate} micro-batches, and {dp.micro_shards} micro-shards, need {unit}: pass "
            "more, or use fewer devices"
        )
    return rows - rows % unit
