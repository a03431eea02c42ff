"""Bytes that a compiled step sends between devices, and work that it does twice."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from replicax.analysis.collectives import SLIGHTLY
from replicax.analysis.compiled import CompiledStep, inspect
from replicax.checks import FAIL, NOTE, PASS, SKIP, Check, Verdict
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import STAGE, replica_count
from replicax.core.modes import MODES
from replicax.core.pipeline import SCHEDULES
from replicax.errors import ReplicaxError
from replicax.verify.facts import Facts
from replicax.verify.independence import DEPENDENT
from replicax.verify.sent import SentOverAxes, bytes_of_layout, read_sent
from replicax.verify.subject import Case, Subject
from replicax.wording import size_text

_FAR = 2.0
"""Times what a layout takes: what is above it is wrong."""
_SMALL_BYTES = 4096
"""Where there is next to nothing to send, what fills it up to whole parts is most of it."""
_REDUNDANT = 1.1
_RECOMPUTED = 4 / 3
"""Times the work of a stage that computes its forward pass once more for the backward one."""
_ALL_OF_IT = 0.9


@dataclasses.dataclass(frozen=True)
class CompiledCase:
    """A case's compiled step."""

    case: Case
    step: CompiledStep
    sent: tuple[SentOverAxes, ...]
    """Its collectives, by kind and mesh axes."""

    @property
    def between(self) -> tuple[int, float]:
        """Collectives between replicas, and the bytes that a device sends for them."""
        counts = [each.count for each in self.sent if each.between]
        return sum(counts), sum(each.between for each in self.sent)


def read_programs(
    subject: Subject, cases: Iterable[Case], show: Callable[[str], None]
) -> dict[Case, CompiledCase]:
    """The compiled steps of those cases that can be compiled."""
    programs = {}
    for case in cases:
        show(f"traffic: {case}")
        try:
            compiled = subject.compiled(case, subject.full)
        except ReplicaxError:
            continue  # parity says why
        except Exception:  # the user's loss: parity says it
            continue
        sent = read_sent(compiled.as_text() or "", subject.parallel(case).mesh)
        programs[case] = CompiledCase(case, inspect(compiled), sent)
    return programs


def check_traffic(
    subject: Subject, facts: Facts, programs: dict[Case, CompiledCase]
) -> Iterator[Check]:
    """A row for each program: its reductions and bytes against what is needed."""
    for case, program in programs.items():
        yield _Traffic(subject, facts, program, programs).check(case)


class _Traffic:
    def __init__(
        self,
        subject: Subject,
        facts: Facts,
        program: CompiledCase,
        programs: dict[Case, CompiledCase],
    ) -> None:
        self._subject, self._facts, self._program = subject, facts, program
        self._layout = subject.parallel(program.case).layout
        self._between = [each for each in program.sent if each.between]
        self._inside = [each for each in program.sent if each.inside]
        self._first = programs.get(dataclasses.replace(program.case, micro_batches=1), program)
        self._reduces_once = MODES["shard_map"].holds(self._layout)

    def check(self, case: Case) -> Check:
        most, least = bytes_of_layout(self._subject, case)
        reductions, sent = self._program.between
        figures = {
            "reductions": reductions,
            "bytes": sent,
            "bytes_inside": sum(each.inside for each in self._inside),
            "least_bytes": least,
            "most_bytes": most,
            "collectives": [dataclasses.asdict(each) for each in self._program.sent],
        }
        if case.devices == 1:
            return Check("traffic", str(case), PASS, "one device sends nothing", "", figures)
        if not least:
            text = f"nothing, as there is one replica{self._named_inside()}"
            return Check("traffic", str(case), PASS, text, "", figures)
        verdict, text, cause = self._judged(case, sent, least, most)
        return Check("traffic", str(case), verdict, text, cause, figures)

    def _judged(
        self, case: Case, sent: float, least: float, most: float
    ) -> tuple[Verdict, str, str]:
        facts, share = self._facts, sent / most
        text = f"{_listed(self._between) or 'nothing'}; {size_text(sent)} a device, "
        text += f"{sent / least:.2f} of the least"
        if most > least:
            text += f", {most / least:.2f} where each layer is gathered as it is used"
        text += self._named_inside()
        if not sent:
            return FAIL, f"{text}: the replicas are not reduced", ""
        statistics = facts.writes or facts.rows.kind == DEPENDENT
        if self._grows():
            more = f"{self._first.between[0]} with 1 micro-batch"
            if statistics and share <= _FAR:
                return NOTE, f"{text}; {more}: statistics of every micro-batch", ""
            cause = f"{GROWS}{ONCE if self._reduces_once else ''}"
            if case == self._subject.own and self._reduces_once:
                return FAIL, f"{text}; {more}", cause
            return NOTE, f"{text}; {more}: {cause}", ""
        if share > SLIGHTLY and statistics:
            return NOTE, f"{text}; statistics or rows of the whole batch are among it", ""
        if share > _FAR and sent - most > _SMALL_BYTES:
            return FAIL, text, f"{TWICE}{ONCE if self._reduces_once else ''}"
        if share > SLIGHTLY:
            return NOTE, f"{text}; {self._why_more(case)}", ""
        return PASS, text, ""

    def _grows(self) -> bool:
        """Whether micro-batches take more reductions, where their layout needs no more."""
        (once, least), (count, sent) = self._first.between, self._program.between
        return not self._layout.splits_params and (count > once or sent > SLIGHTLY * least)

    def _why_more(self, case: Case) -> str:
        if case.mode.per_replica:
            return FILLED_UP
        why = WHOLE_FIRST if self._layout.splits_optimizer else TWO_SUMS
        return f"{why}{ONCE if self._reduces_once else ''}"

    def _named_inside(self) -> str:
        if not self._inside:
            return ""
        size = size_text(sum(each.inside for each in self._inside))
        return f"; inside a replica {_listed(self._inside)}, {size}"


def _listed(sent: Iterable[SentOverAxes]) -> str:
    counts: Counter[str] = Counter()
    for each in sent:
        counts[each.kind] += each.count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


FILLED_UP = "parts are filled up, or more than gradient and metrics is reduced"
WHOLE_FIRST = "the compiler reduces whole what each replica then takes a part of"
TWO_SUMS = "the compiler reduces a leaf twice (a tied embedding) or a sum by itself"
GROWS = "the compiler reduces inside the loop over micro-batches"
TWICE = (
    "something besides the gradient's sums crosses the network: an operation that mixes rows (a "
    "sort or a reshape over the row dim), or a leaf that is reduced several times"
)
ONCE = "; use mode='shard_map', which sends each sum once"


def check_work(
    subject: Subject, programs: dict[Case, CompiledCase], single: CompiledStep
) -> Iterator[Check]:
    """A row for each program: FLOPs on all devices against those of one."""
    for case, program in programs.items():
        name, flops = str(case), program.step.flops
        if not single.flops or not flops:
            yield Check("redundant work", name, SKIP, "its program has no matrix products to count")
            continue
        dp = subject.parallel(case)
        ticks = ticks_of(dp)
        times = flops * case.devices / single.flops * case.micro_batches / ticks
        text = f"{times:.2f} times the FLOPs of one device, over {case.devices}"
        figures = {"flops_per_device": flops, "flops_of_one": single.flops, "ticks": ticks}
        replicas, most = replica_count(dp.mesh), _REDUNDANT
        if dp.mesh.shape.get(STAGE, 1) > 1:
            text += f"; {ticks} ticks of a pipeline, each as if no stage waited in it"
            most *= _RECOMPUTED
        of_each = case.devices // replicas
        if times <= most:
            yield Check("redundant work", name, PASS, text, "", figures)
        elif replicas > 1 and times >= _ALL_OF_IT * case.devices:
            yield Check("redundant work", name, FAIL, text, EVERYTHING, figures)
        elif of_each > 1 and times >= _ALL_OF_IT * of_each:
            cause = NOT_SPLIT.format(of_each)
            yield Check("redundant work", name, FAIL, text, cause, figures)
        else:
            text += ": some products do not depend on the rows, and each device computes them"
            yield Check("redundant work", name, NOTE, text, "", figures)


def ticks_of(dp: DataParallel) -> int:
    """Return how often a step does what it does for one micro-batch; more than those in stages."""
    stages: int = dp.mesh.shape.get(STAGE, 1)
    parts: int = dp.accumulate
    if stages == 1:
        return parts
    turn: int = SCHEDULES[dp.layout.schedule](stages, parts)
    return turn + parts + stages - 1


EVERYTHING = (
    "every device computes the whole batch: an operation of the loss keeps the compiler from "
    "splitting the rows (a reshape or a gather that mixes them); use mode='shard_map', or "
    "constrain the rows to stay split"
)
NOT_SPLIT = (
    "the {} devices of a replica all compute the same: the layout's rules split none of the large "
    "matrices; write rules for those, or leave the devices to axis 'data'"
)
