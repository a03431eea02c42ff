"""What a compiled step sends between devices, and what it computes twice."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from replicax.analysis.compiled import CompiledStep, inspect
from replicax.analysis.traffic import (
    SLIGHTLY,
    sums_bytes,
    wire_bytes,
    wire_bytes_of_all_reduce,
)
from replicax.core.mesh import replica_count
from replicax.core.models.definition import View
from replicax.errors import ReplicaxError
from replicax.verify.check import FAIL, NOTE, PASS, SKIP, Check, Verdict
from replicax.verify.facts import Facts
from replicax.verify.independence import DEPENDENT
from replicax.verify.subject import Case, Subject
from replicax.wording import size_text

_FAR = 2.0
"""Times the lower bound: what is above it is wrong."""
_SMALL_BYTES = 4096
"""Where there is next to nothing to send, what fills it up to whole parts is most of it."""
_REDUNDANT = 1.1
_ALL_OF_IT = 0.9


@dataclasses.dataclass(frozen=True)
class Program:
    """A case's compiled step."""

    case: Case
    step: CompiledStep

    @property
    def reductions(self) -> int:
        """Collectives in one step."""
        return sum(each.count for each in self.step.collectives)


def read_programs(
    subject: Subject, cases: Iterable[Case], show: Callable[[str], None]
) -> dict[Case, Program]:
    """The compiled steps of those cases that can be compiled."""
    programs = {}
    for case in cases:
        show(f"traffic: {case}")
        try:
            programs[case] = Program(case, inspect(subject.compiled(case, subject.full)))
        except ReplicaxError:
            continue  # parity says why
        except Exception:  # the user's loss: parity says it
            continue
    return programs


def check_traffic(subject: Subject, facts: Facts, programs: dict[Case, Program]) -> Iterator[Check]:
    """A row for each program: its reductions and bytes against what is needed."""
    for case, program in programs.items():
        yield _Traffic(subject, facts, program, programs).check(case)


class _Traffic:
    def __init__(
        self, subject: Subject, facts: Facts, program: Program, programs: dict[Case, Program]
    ) -> None:
        self._subject, self._facts, self._program = subject, facts, program
        first = dataclasses.replace(program.case, micro_batches=1)
        self._one = programs.get(first)

    def check(self, case: Case) -> Check:
        subject, program = self._subject, self._program
        least = wire_bytes_of_all_reduce(bytes_needed(subject, case), case.devices)
        sent = sum(wire_bytes(each, case.devices) for each in program.step.collectives)
        figures = {
            "reductions": program.reductions,
            "bytes": sent,
            "least_bytes": least,
            "collectives": [dataclasses.asdict(each) for each in program.step.collectives],
        }
        if case.devices == 1:
            return Check("traffic", str(case), PASS, "one device sends nothing", "", figures)
        verdict, text, cause = self._judged(case, sent, least)
        return Check("traffic", str(case), verdict, text, cause, figures)

    def _judged(self, case: Case, sent: float, least: float) -> tuple[Verdict, str, str]:
        program, facts = self._program, self._facts
        kinds = ", ".join(f"{each.count} {each.kind}" for each in program.step.collectives)
        share = sent / least
        text = f"{kinds or 'nothing'}; {size_text(sent)} a device, {share:.2f} of the least"
        if not self._subject.parallel(case).layout.is_whole:
            return NOTE, f"{text}; a split layout also gathers what it splits", ""
        if not program.reductions:
            return FAIL, f"{text}: the replicas are not reduced", ""
        if self._one and program.reductions > self._one.reductions:
            more = f"{self._one.reductions} with 1 micro-batch"
            statistics = facts.writes or facts.rows.kind == DEPENDENT
            if statistics and share <= _FAR:
                return NOTE, f"{text}; {more}: statistics of every micro-batch", ""
            if case == self._subject.own:
                return FAIL, f"{text}; {more}", GROWS
            return NOTE, f"{text}; {more}: {GROWS}", ""
        if share > SLIGHTLY and (facts.writes or facts.rows.kind == DEPENDENT):
            return NOTE, f"{text}; statistics or rows of the whole batch are among it", ""
        if share > _FAR and sent - least > _SMALL_BYTES:
            return FAIL, text, TWICE
        if share > SLIGHTLY:
            return NOTE, f"{text}; {FILLED_UP if case.mode.per_replica else TWO_SUMS}", ""
        return PASS, text, ""


FILLED_UP = "parts are filled up, or more than gradient and metrics is reduced"
TWO_SUMS = (
    "the compiler reduces a leaf twice (a tied embedding) or a sum by itself; mode='shard_map' "
    "reduces once"
)
GROWS = (
    "the compiler reduces inside the loop over micro-batches; use mode='shard_map', which reduces "
    "once after it"
)
TWICE = (
    "something besides the gradient's sums crosses the network: an operation that mixes rows (a "
    "sort or a reshape over the row dim), or a leaf that is reduced several times; use "
    "mode='shard_map', which reduces once"
)


def check_work(
    subject: Subject, programs: dict[Case, Program], single: CompiledStep
) -> Iterator[Check]:
    """A row for each program: FLOPs on all devices against those of one."""
    for case, program in programs.items():
        name, flops = str(case), program.step.flops
        if not single.flops or not flops:
            yield Check("redundant work", name, SKIP, "its program has no matrix products to count")
            continue
        times = flops * case.devices / single.flops
        text = f"{times:.2f} times the FLOPs of one device, over {case.devices}"
        figures = {"flops_per_device": flops, "flops_of_one": single.flops}
        replicas = replica_count(subject.parallel(case).mesh)
        of_each = case.devices // replicas
        if times <= _REDUNDANT:
            yield Check("redundant work", name, PASS, text, "", figures)
        elif replicas > 1 and times >= _ALL_OF_IT * case.devices:
            yield Check("redundant work", name, FAIL, text, EVERYTHING, figures)
        elif of_each > 1 and times >= _ALL_OF_IT * of_each:
            cause = NOT_SPLIT.format(of_each)
            yield Check("redundant work", name, FAIL, text, cause, figures)
        else:
            text += ": some products do not depend on the rows, and each device computes them"
            yield Check("redundant work", name, NOTE, text, "", figures)


EVERYTHING = (
    "every device computes the whole batch: an operation of the loss keeps the compiler from "
    "splitting the rows (a reshape or a gather that mixes them); use mode='shard_map', or "
    "constrain the rows to stay split"
)
NOT_SPLIT = (
    "the {} devices of a replica all compute the same: the layout's rules split none of the large "
    "matrices; write rules for those, or leave the devices to axis 'data'"
)


def bytes_needed(subject: Subject, case: Case) -> int:
    """Bytes of the sums of loss, metrics and the gradient that the optimizer reads, as sent."""
    state, batch = subject.state, subject.full
    metrics: Any = jax.eval_shape(
        lambda params: subject.objective.loss_sums(
            params, state.extras, batch, View(jax.random.key(0))
        )[0],
        state.params,
    )
    sent = getattr(subject.parallel(case).reduction, "dtype", None)
    is_trained = jax.tree.leaves(subject.trained)
    trained = itertools.compress(jax.tree.leaves(state.params), is_trained)
    return sums_bytes(trained, len(metrics), sent)
