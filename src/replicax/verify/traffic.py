"""Check the bytes that a compiled step sends between devices, and redundant work."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.analysis import hlo
from replicax.analysis.collectives import (
    SLIGHTLY,
    axes_of_group,
    first_group,
    sums_bytes,
    wire_bytes,
    wire_bytes_of_all_reduce,
)
from replicax.analysis.compiled import (
    Collectives,
    CompiledStep,
    collective_kind,
    inspect,
    result_bytes,
)
from replicax.checks import FAIL, NOTE, PASS, SKIP, Check, Verdict
from replicax.core.data_parallel import DataParallel
from replicax.core.models.definition import CallContext
from replicax.core.modes import MODES
from replicax.core.placement.mesh import DATA, FSDP, STAGE, replica_count, shard_axis
from replicax.core.placement.pipeline_schedules import SCHEDULES
from replicax.core.placement.sharding_rules import axes_of
from replicax.errors import ReplicaxError
from replicax.verify.facts import Facts
from replicax.verify.independence import DEPENDENT
from replicax.verify.step_program import ALL, REDUNDANT, redundant_work
from replicax.verify.subject import Case, Subject
from replicax.wording import size_text

_FAR = 2.0
"""More than this many times the bytes of the layout is an error."""
_SMALL_BYTES = 4096
"""Excess bytes that are ignored: padding dominates very small transfers."""
_RECOMPUTED = 4 / 3
"""Relative work of a stage that recomputes its forward pass in the backward pass."""


@dataclasses.dataclass(frozen=True)
class SentOverAxes:
    """All collectives of one kind over the same axes in one step, counting loop iterations."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes of more than one device."""
    count: int
    bytes: int
    """Result bytes on one device, summed over the count."""
    between: float
    """Bytes that a device sends between replicas, in a ring."""
    inside: float
    """Bytes that a device sends within its replica."""


def read_sent(text: str, mesh: Mesh) -> tuple[SentOverAxes, ...]:
    """Return the collectives of a step that was compiled to `text` for `mesh`."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    sizes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for instruction in hlo.instructions(text):
        kind = collective_kind(instruction)
        if kind and not instruction.continues:
            group = first_group(instruction.attributes)
            over = axes_of_group(group, mesh.shape) or tuple(mesh.axis_names)
            axes = tuple(axis for axis in over if mesh.shape[axis] > 1)
            counts[kind, axes] += instruction.runs
            sizes[kind, axes] += instruction.runs * result_bytes(instruction)
    return tuple(_sent(mesh, *each, counts[each], sizes[each]) for each in sorted(counts))


def _sent(mesh: Mesh, kind: str, axes: tuple[str, ...], count: int, size: int) -> SentOverAxes:
    devices = math.prod(mesh.shape[axis] for axis in axes)
    replicas = math.prod(mesh.shape[axis] for axis in axes if axis in (DATA, FSDP))
    sent = wire_bytes(Collectives(kind, count, size), devices)
    # A ring sends a share of 1 - 1 / N: between replicas alone, and the remainder inside them.
    share = (1 - 1 / replicas) / (1 - 1 / devices) if devices > 1 else 0.0
    return SentOverAxes(kind, axes, count, size, sent * share, sent - sent * share)


@dataclasses.dataclass(frozen=True)
class CompiledCase:
    """The compiled step of a case."""

    case: Case
    step: CompiledStep
    sent: tuple[SentOverAxes, ...]
    """Its collectives, by kind and mesh axes."""

    @property
    def between(self) -> tuple[int, float]:
        """Return the number of collectives between replicas and the bytes sent per device."""
        counts = [each.count for each in self.sent if each.between]
        return sum(counts), sum(each.between for each in self.sent)


def read_programs(
    subject: Subject, cases: Iterable[Case], show: Callable[[str], None]
) -> dict[Case, CompiledCase]:
    """Return the compiled steps of the cases that can be compiled."""
    programs = {}
    for case in cases:
        show(f"traffic: {case}")
        try:
            compiled = subject.compiled(case, subject.full)
        except ReplicaxError:
            continue  # parity reports why
        except Exception:  # the user's loss: parity reports it
            continue
        sent = read_sent(compiled.as_text() or "", subject.parallel(case).mesh)
        programs[case] = CompiledCase(case, inspect(compiled), sent)
    return programs


def check_traffic(
    subject: Subject, facts: Facts, programs: dict[Case, CompiledCase]
) -> Iterator[Check]:
    """Yield a row for each program, comparing its reductions and bytes with the minimum."""
    for case, program in programs.items():
        most, least = bytes_of_layout(subject, case)
        reductions, sent = program.between
        inside = [each for each in program.sent if each.inside]
        inside_bytes = sum(each.inside for each in inside)
        figures = {
            "reductions": reductions,
            "bytes": sent,
            "bytes_inside": inside_bytes,
            "least_bytes": least,
            "most_bytes": most,
            "collectives": [dataclasses.asdict(each) for each in program.sent],
        }
        within = (
            f"; inside a replica {_listed(inside)}, {size_text(inside_bytes)}" if inside else ""
        )
        verdict: Verdict = PASS
        cause = ""
        if case.devices == 1:
            text = "one device sends nothing"
        elif not least:
            text = f"nothing, since there is only one replica{within}"
        else:
            text = f"{_listed(each for each in program.sent if each.between) or 'nothing'}; "
            text += f"{size_text(sent)} per device, {sent / least:.2f} times the minimum"
            if most > least:
                text += f", {sent / most:.2f} times that of gathering each layer as it is used"
            first = programs.get(dataclasses.replace(case, micro_batches=1), program)
            verdict, more, cause = _judged(subject, facts, program, first, most)
            text += within + more
        yield Check("traffic", str(case), verdict, text + _analysed(case), cause, figures)


def _judged(
    subject: Subject, facts: Facts, program: CompiledCase, first: CompiledCase, most: float
) -> tuple[Verdict, str, str]:
    """Return the verdict on a program, an addition to the text, and the cause.

    `first` is the same case with one micro-batch; `most` is the bytes that its layout explains.
    """
    case, layout = program.case, subject.parallel(program.case).layout
    count, sent = program.between
    share = sent / most
    once = ONCE if MODES["shard_map"].holds(layout) else ""
    if not sent:
        return FAIL, ": nothing is reduced over the replicas", ""
    statistics = facts.writes or facts.rows.gathers or facts.rows.kind == DEPENDENT
    grows = count > first.between[0] or sent > SLIGHTLY * first.between[1]
    if grows and not layout.splits_params:  # split parameters are gathered per micro-batch
        more = f"; {first.between[0]} with 1 micro-batch"
        if statistics and share <= _FAR:
            return NOTE, f"{more}: statistics of every micro-batch", ""
        if case == subject.own and once:
            return FAIL, more, f"{GROWS}{once}"
        return NOTE, f"{more}: {GROWS}{once}", ""
    if share > SLIGHTLY and statistics:
        return NOTE, "; this includes statistics or rows of the whole batch", ""
    if share > _FAR and sent - most > _SMALL_BYTES:
        return FAIL, "", f"{TWICE}{once}"
    if share <= SLIGHTLY:
        return PASS, "", ""
    if case.mode.per_replica:
        return NOTE, f"; {FILLED_UP}", ""
    return NOTE, f"; {WHOLE_FIRST if layout.splits_optimizer else TWO_SUMS}{once}", ""


def bytes_of_layout(subject: Subject, case: Case) -> tuple[float, float]:
    """Return the most and the fewest bytes that a device sends to other replicas under its layout.

    The minimum reduces the sums once, or scatters them and gathers the results. A layout that
    splits the parameters gathers them twice and scatters once per micro-batch.
    """
    mesh, layout = subject.parallel(case).mesh, subject.parallel(case).layout
    least = wire_bytes_of_all_reduce(bytes_needed(subject, case), replica_count(mesh))
    if not layout.splits_params:
        return least, least
    parts = mesh.shape[shard_axis(mesh)]
    gathered = wire_bytes_of_all_reduce(sums_bytes(_of_replica(subject, case), 0), parts) / 2
    return least + (3 * case.micro_batches - 2) * gathered, least


def bytes_needed(subject: Subject, case: Case) -> int:
    """Return the bytes of the sums of loss, metrics and trained gradients, as sent."""
    state, batch = subject.state, subject.full
    metrics: Any = jax.eval_shape(
        lambda params, extras, batch: subject.objective.loss_sums(
            params, extras, batch, CallContext(jax.random.key(0))
        )[0],
        *(state.params, state.extras, batch),
    )
    sent = getattr(subject.parallel(case).reduction, "dtype", None)
    trained = itertools.compress(_of_replica(subject, case), jax.tree.leaves(subject.trained))
    return sums_bytes(trained, len(metrics), sent)


def _of_replica(subject: Subject, case: Case) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the gathered parameters on one device of a replica."""
    found = []
    for leaf in jax.tree.leaves(subject.abstract(case).params):
        entries = [axes_of(PartitionSpec(entry)) for entry in leaf.sharding.spec]
        kept = [tuple(axis for axis in axes if axis not in (DATA, FSDP)) for axes in entries]
        own = NamedSharding(leaf.sharding.mesh, PartitionSpec(*kept))
        found.append(jax.ShapeDtypeStruct(own.shard_shape(leaf.shape), leaf.dtype))
    return found


def _listed(sent: Iterable[SentOverAxes]) -> str:
    counts: Counter[str] = Counter()
    for each in sent:
        counts[each.kind] += each.count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


FILLED_UP = "shards are padded, or more than the gradient and metrics is reduced"
WHOLE_FIRST = "the compiler reduces whole arrays of which each replica keeps only a shard"
TWO_SUMS = "the compiler reduces a leaf twice (a tied embedding) or a sum separately"
GROWS = "the compiler reduces inside the loop over micro-batches"
TWICE = (
    "more than the gradient sums crosses the network: an operation that mixes rows (a sort or a "
    "reshape over the row dimension), or a leaf that is reduced several times"
)
ONCE = "; use mode='shard_map', which sends each sum once"


def check_work(
    subject: Subject, programs: dict[Case, CompiledCase], single: CompiledStep
) -> Iterator[Check]:
    """Yield a row for each program, comparing the FLOPs on all devices with those of one."""
    for case, program in programs.items():
        name, flops = str(case), program.step.flops
        if not single.flops or not flops:
            yield Check("redundant work", name, SKIP, "its program has no matrix products to count")
            continue
        dp = subject.parallel(case)
        ticks = ticks_of(dp)
        times = flops * case.devices / single.flops * case.micro_batches / ticks
        text = f"{times:.2f} times the FLOPs of one device, summed over {case.devices}"
        text += _analysed(case)
        figures = {"flops_per_device": flops, "flops_of_one": single.flops, "ticks": ticks}
        most, of_each = REDUNDANT, case.devices // replica_count(dp.mesh)
        if dp.mesh.shape.get(STAGE, 1) > 1:
            text += f"; {ticks} pipeline ticks, each counted as if no stage were idle"
            most *= _RECOMPUTED
        everything = of_each < case.devices and times >= ALL * case.devices
        cause = EVERYTHING if everything else NOT_SPLIT.format(of_each)
        split = of_each if of_each > 1 else case.devices
        yield redundant_work(name, text, times, split, cause, figures, most=most)


def _analysed(case: Case) -> str:
    """Return what a row says if its figures are not those of the programs that run."""
    return f"; {case.mode.analysed}" if case.mode.analysed else ""


def ticks_of(dp: DataParallel) -> int:
    """Return how often a step repeats the work of one micro-batch; more often in a pipeline."""
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
    "the {} devices of a replica all compute the same: the layout rules split none of the large "
    "matrices; add rules for these, or assign the devices to axis 'data'"
)
