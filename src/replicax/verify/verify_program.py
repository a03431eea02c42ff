"""Implement `verify_program`: compare a step on many devices with the same step on one."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.analysis.compiled import inspect
from replicax.core.data.rows import opened
from replicax.core.data_parallel import DataParallel
from replicax.core.models.definition import CallContext
from replicax.core.modes.mode_table import MODES, Mode, as_mode
from replicax.core.placement.mesh import platform_of, replica_count
from replicax.core.step.loss import LOSS, Weighted
from replicax.errors import ConfigError
from replicax.known_wrong.findings import lines_once
from replicax.text.checks import FAIL, NOTE, SKIP, Check
from replicax.text.streams import alarm
from replicax.text.wording import named
from replicax.verify.devices_asked import check_devices_asked
from replicax.verify.exactness import (
    bits_of_islands,
    bits_on,
    check_exactness,
    check_simulated_islands,
    compile_bits_ahead,
    on_devices,
    replica_counts,
)
from replicax.verify.facts import Facts, examine_subject, trace_loss
from replicax.verify.independence import DEPENDENT
from replicax.verify.plain import PlainLoss, plain_means
from replicax.verify.plain_step import PlainStep
from replicax.verify.program_cases import NOT_REPEATABLE, ProgramCases
from replicax.verify.reduced import check_reduced
from replicax.verify.round_checks import check_rounds
from replicax.verify.stages import OnCheck, Show, VerifyStage, run_stages
from replicax.verify.subject import Case, Subject
from replicax.verify.sums import Elsewhere, check_sums, with_sums_as_cause
from replicax.verify.traffic import CompiledCase, check_traffic, check_work, read_programs
from replicax.verify.verification import Verification, failed_on_one_device
from replicax.verify.verify_custom_step import verify_custom_step

ALL = "all"
MICRO_BATCHES_TRIED = 2
ROWS_OF_ONE = 2
"""Rows per micro-batch of a replica; more would show nothing new."""
Looked = tuple[Iterator[Check], Callable[[], bool]]
"""Rows, and whether the step is known to have no 16-bit floats."""
_AHEAD = 3
"""Cases whose programs are being compiled, from the one that is compared."""


def verify_program(
    dp: DataParallel,
    model: Any,
    batch: Any,
    *,
    modes: Sequence[str | Mode] | str | None = None,
    micro_batches: int = MICRO_BATCHES_TRIED,
    batch_size: int | None = None,
    elsewhere: Elsewhere | None = None,
    seed: int = 0,
    surrogates: Collection[str] = (),
    show: Show | None = None,
    found: OnCheck | None = None,
) -> Verification:
    """Implement `replicax.verified.verify`; `elsewhere` is the target's compiler."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"verify on {jax.process_count()} processes; it reads every device's copies and must "
            "run in one process: start it alone, with simulated CPU devices"
        )
    started = time.monotonic()
    for line in lines_once(platform_of(dp.mesh)):
        alarm(line)
    chosen = modes_of(dp, modes)
    given = opened(batch)
    if given.sets:
        raise ConfigError(
            "verify was given a batch with an rx.ExtraRows, which it does not cut: compare dp.step "
            "with mode='single', or verify a step without the set"
        )
    rows = _rows(dp, given.count, micro_batches)
    batch = jax.tree.map(lambda leaf: leaf[:rows], batch)
    about = {
        **dp.configuration.names(),
        "devices": int(dp.mesh.devices.size),
        "replicas": replica_count(dp.mesh),
        "platform": dp.mesh.devices.flat[0].platform,
        "modes": [mode.name for mode in chosen],
        "other_modes": [name for name in MODES if name != dp.mode.name] if modes is None else [],
        "micro_batches": micro_batches,
        "rows": rows,
    }
    show, found = show or (lambda text: None), found or (lambda check: None)
    rounds: Iterable[Check] = ()
    if dp.configuration.rounds is not None:
        rounds = check_rounds(dp, model, batch, seed, show)
    if dp.configuration.arguments["rounds"] is not None:
        dp = dp.replace(rounds=None)  # the rest is about the steps of an island
    look = _of_custom_step
    if dp.configuration.step is None:
        look = partial(_of_program, chosen=modes not in (None, ALL), surrogates=surrogates)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (batch_size or rows, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)
        ),
        batch,
    )

    @cache
    def sums() -> list[Check]:
        show("sums")
        return list(check_sums(dp, model, shapes, elsewhere, without))

    others, without = look(dp, model, batch, chosen, micro_batches, seed, show)
    checks = list[Check]()
    for check in chain(rounds, others):
        checks.append(with_sums_as_cause(check, sums))
        found(checks[-1])
    for check in sums():
        checks.append(check)
        found(check)
    return Verification(checks, {**about, "seconds": round(time.monotonic() - started, 1)})


def rows_needed(dp: DataParallel, micro_batches: int = MICRO_BATCHES_TRIED) -> int:
    """Return the rows of the smallest batch that exercises every check."""
    shards = max(replica_count(dp.mesh) * max(micro_batches, dp.accumulate), dp.micro_shards)
    return shards * ROWS_OF_ONE


def _of_custom_step(*given: Any) -> Looked:
    return verify_custom_step(*given), lambda: False


def _of_program(
    dp: DataParallel,
    model: Any,
    batch: Any,
    modes: Sequence[Mode],
    micro_batches: int,
    seed: int,
    show: Show,
    *,
    chosen: bool,
    surrogates: Collection[str],
) -> Looked:
    show("one device")
    try:
        subject = Subject(dp, model, batch, micro_batches, seed)
        PlainStep(subject).compile_ahead(subject.full)
        traced = trace_loss(subject)
    except Exception as error:  # the user's loss
        return iter([failed_on_one_device(error)]), lambda: False

    def checks() -> Iterator[Check]:
        if traced.rows is not None:
            yield traced.rows.check(fails=False)
        try:
            subject.compile_update_ahead()
            subject.compile_ahead(subject.own, subject.full)
            subject.warm(PlainStep(subject))
            facts = examine_subject(subject, traced)
        except Exception as error:  # the user's loss
            yield failed_on_one_device(error)
            return
        if traced.rows is None:
            depends, own = facts.rows.kind == DEPENDENT, subject.own
            splits = own.mode.per_replica or own.micro_batches > 1
            yield facts.rows.check(fails=depends and splits)
        yield from _on_one_device(subject, facts)
        cases_of = ProgramCases(subject, facts, surrogates)
        counts = replica_counts(dp)
        yield from run_stages(_stages(subject, facts, cases_of, modes, counts, chosen=chosen), show)

    return checks(), subject.has_no_16_bits


def _on_one_device(subject: Subject, facts: Facts) -> Iterator[Check]:
    if facts.constant_key and not facts.rows.positional:
        yield Check("parity", "random numbers", NOTE, DRAWN_FROM_A_CONSTANT)
    yield from check_devices_asked(facts.asked)
    if LOSS not in facts.scalars:
        yield from check_evaluated(subject)


def _stages(
    subject: Subject,
    facts: Facts,
    cases_of: ProgramCases,
    modes: Sequence[Mode],
    counts: list[int],
    *,
    chosen: bool,
) -> list[VerifyStage]:
    """Return the stages of all cases, and those that begin to compile programs of later ones."""
    cases, own, stages = _cases(subject, modes), subject.own, list[VerifyStage]()
    # Unless it is the training mode or requested, one device and all of them suffice.
    few = sorted({counts[0], counts[-1]})
    counts_of = {mode: counts if mode == own.mode or chosen else few for mode in modes}

    def compile_ahead(some: Sequence[Case]) -> Sequence[Check]:
        for case in some:
            cases_of.compile_ahead(case)
            if case.mode.bitwise and facts.repeatable:
                compile_bits_ahead(subject, facts, case.mode, counts_of.get(case.mode, []))
        return ()

    def begun(number: int) -> int:
        """Return how many cases are being compiled when one is compared: at first, few."""
        return number + _AHEAD if number else _AHEAD - 1

    for number, case in enumerate(cases):
        later = cases[begun(number - 1) if number else 0 : begun(number)]
        if later:
            stages.append(
                (f"tracing {named([str(each) for each in later])}", partial(compile_ahead, later))
            )
        stages += cases_of.stages(case)
    for mode in modes:
        if mode.bitwise:
            wanted, islands = counts_of[mode], mode == own.mode or chosen
            bits = partial(_bits, subject, facts, mode, wanted, islands=islands)
            stages.append((f"parity: bits of {mode} on {on_devices(wanted)}", bits))
    programs: dict[Case, CompiledCase] = {}
    further: list[VerifyStage] = [
        ("traffic and work", partial(_traffic, subject, facts, cases, programs)),
        *cases_of.topics(cases, programs.__contains__),
    ]
    return stages + [(name, _if_it_runs(cases_of, checks)) for name, checks in further]


def _if_it_runs(
    cases_of: ProgramCases, checks: Callable[[], Iterable[Check]]
) -> Callable[[], Iterable[Check]]:
    return lambda: checks() if cases_of.runs else ()


def _bits(
    subject: Subject, facts: Facts, mode: Mode, counts: list[int], *, islands: bool
) -> Iterator[Check]:
    """Yield the rows on the bits of a mode."""
    if not facts.repeatable:
        yield Check("parity", str(mode), SKIP, NOT_REPEATABLE)
        return
    is_own = subject.own.mode == mode
    yield check_exactness(mode, counts, partial(bits_on, subject, facts, mode), is_own)
    if islands:
        of_islands = partial(bits_of_islands, subject, facts, mode)
        yield check_simulated_islands(mode, of_islands, is_own)


def _traffic(
    subject: Subject, facts: Facts, cases: Sequence[Case], programs: dict[Case, CompiledCase]
) -> Iterator[Check]:
    """Yield the rows on the compiled steps of all cases, which are added to `programs`."""
    of_several = [case for case in cases if case.devices > 1 or case == subject.own]
    programs.update(read_programs(subject, of_several))
    for case, program in programs.items():
        if program.unreduced is not None:
            yield check_reduced(program.unreduced, str(case))
    yield from check_traffic(subject, facts, programs)
    of_one = inspect(PlainStep(subject).compiled(subject.full))
    yield from check_work(subject, programs, of_one, subject.update_flops())


DRAWN_FROM_A_CONSTANT = (
    "some do not depend on the loss's key: they are the same in every step, on every replica"
)


def _cases(subject: Subject, modes: Sequence[Mode]) -> list[Case]:
    """Return the modes with one and several micro-batches, the step's own case and mode first.

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
    own = subject.own
    return sorted(cases, key=lambda case: (case.mode != own.mode, case != own))


def modes_of(dp: DataParallel, modes: Sequence[str | Mode] | str | None) -> list[Mode]:
    """Return the chosen modes: by default the step's own; of all, those of one device last."""
    if modes is None:
        return [dp.mode]
    if modes == ALL:
        return sorted(MODES.values(), key=lambda mode: mode.most_devices == 1)
    return list(dict.fromkeys(map(as_mode, [modes] if isinstance(modes, str) else modes)))


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


_NEAR = 1e-3


def check_evaluated(subject: Subject) -> Iterator[Check]:
    """Yield a row if the loss is one number in evaluation, and the sum of those of its rows."""
    objective, state, count = subject.objective, subject.state, subject.rows // 2
    loss = PlainLoss(objective.definition, objective.loss, objective.precision)

    def value(first: int, last: int) -> jax.Array:
        batch = subject.some(np.arange(first, last)).apart()
        context = CallContext(whole=True, only_read=True, step=jnp.int32(0))
        found, _ = loss.returned(state.params, state.extras, batch, context)
        values = found[0] if isinstance(found, tuple) else found
        if jnp.ndim(values.values if isinstance(values, Weighted) else values):
            raise _ByRowError
        mean: jax.Array = plain_means(values)[LOSS]
        return mean

    with contextlib.suppress(Exception):  # a value for each row, or no evaluation without a key
        parts = ((0, 2 * count), (0, count), (count, 2 * count))
        whole, one, other = (float(jax.jit(lambda part=part: value(*part))()) for part in parts)
        if abs(whole - one - other) <= _NEAR * abs(whole) and abs(one + other) > 0:
            text = f"{whole:.4g}, the sum of the losses of both halves of its rows"
            yield Check("parity", "evaluation", FAIL, text, SUM_IN_EVALUATION)


class _ByRowError(Exception):
    """Raised where the loss has a value for each row."""


SUM_IN_EVALUATION = (
    "a loss that is one number counts as the mean of its rows, so an evaluation of sums depends on "
    "the batch size: return one value per row in evaluation, too, or the mean"
)
