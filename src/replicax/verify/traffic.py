"""Check the bytes that the program of each case sends between devices, and redundant work."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.analysis import hlo
from replicax.analysis.collectives import (
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
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import owned_nodes
from replicax.core.placement.mesh import DATA, FSDP, STAGE, replica_count, shard_axis, split_dim
from replicax.core.placement.pipeline_schedules import SCHEDULES
from replicax.core.placement.sharding_rules import axes_of
from replicax.core.step.reduction import Wire
from replicax.errors import ReplicaxError
from replicax.text.checks import PASS, SKIP, Check, Verdict
from replicax.text.wording import size_text
from replicax.verify.facts import Facts
from replicax.verify.program_judge import (
    EVERYTHING,
    NO_PRODUCTS,
    counts_by_kind,
    judge_traffic,
    judge_work,
)
from replicax.verify.reduced import unreduced
from replicax.verify.subject import Case, Subject

_UPDATED = ("state.params", "state.opt_state")
"""Results of a step that hold sums over all rows, also where a layout splits them."""
_RECOMPUTED = 4 / 3
"""Relative work of a stage that recomputes its forward pass in the backward pass."""


@dataclasses.dataclass(frozen=True)
class SentOverAxes(Collectives):
    """All collectives of one kind over the same axes in one step."""

    axes: tuple[str, ...]
    """Mesh axes of more than one device."""
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
    return SentOverAxes(kind, count, size, axes, sent * share, sent - sent * share)


@dataclasses.dataclass(frozen=True)
class CompiledCase:
    """The compiled step of a case."""

    case: Case
    step: CompiledStep
    sent: tuple[SentOverAxes, ...]
    """Its collectives, by kind and mesh axes."""
    unreduced: list[str] | None = None
    """Results that rows reach without a reduction; None if its program cannot be followed."""

    @property
    def between(self) -> tuple[int, float]:
        """Return the number of collectives between replicas and the bytes sent per device."""
        counts = [each.count for each in self.sent if each.between]
        return sum(counts), sum(each.between for each in self.sent)


def read_programs(subject: Subject, cases: Iterable[Case]) -> dict[Case, CompiledCase]:
    """Return the compiled steps of the cases that can be compiled."""
    programs = {}
    for case in cases:
        try:
            compiled = subject.compiled(case, subject.full)
        except ReplicaxError:
            continue  # parity reports why
        except Exception:  # the user's loss: parity reports it
            continue
        mesh = subject.parallel(case).mesh
        sent = read_sent(compiled.as_text() or "", mesh)
        several, state = replica_count(mesh) > 1, subject.placed(case, subject.state)
        found = unreduced(compiled, state, mesh.shape, _UPDATED) if several else None
        programs[case] = CompiledCase(case, inspect(compiled), sent, found)
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
            f"; inside a replica {counts_by_kind(inside)}, {size_text(inside_bytes)}"
            if inside
            else ""
        )
        verdict: Verdict = PASS
        cause = ""
        if case.devices == 1:
            text = "one device sends nothing"
        elif not least:
            text = f"nothing, since there is only one replica{within}"
        else:
            text = f"{counts_by_kind(each for each in program.sent if each.between)}; "
            text += f"{size_text(sent)} per device, {sent / least:.2f} times the minimum"
            if most > least:
                text += f", {sent / most:.2f} times that of gathering each layer as it is used"
            of_one = programs.get(dataclasses.replace(case, micro_batches=1), program)
            verdict, more, cause = judge_traffic(
                subject, facts, case, program.between, of_one.between, most
            )
            text += within + more
        yield Check("traffic", str(case), verdict, text + _analysed(case), cause, figures)


def bytes_of_layout(subject: Subject, case: Case) -> tuple[float, float]:
    """Return the most and the fewest bytes that a device sends to other replicas under its layout.

    The minimum reduces the sums once, or scatters them and gathers the results. Owners of matrices
    are sent whole gradients, and with split parameters these, and send updates. A layout that
    splits the parameters gathers them twice and scatters once per micro-batch. One that splits the
    optimizer state gathers them after a reduction that cannot scatter.
    """
    dp = subject.parallel(case)
    mesh, layout = dp.mesh, dp.layout
    least = wire_bytes_of_all_reduce(bytes_needed(subject, case), replica_count(mesh))
    least += _merged_bytes(subject, case)
    parts = mesh.shape[shard_axis(mesh)]
    if layout.splits_optimizer:
        whole = not layout.splits_params
        for owned in owned_nodes(subject.state.opt_state):
            exchanged = owned.slot_bytes / parts * (1 if whole else 3)
            least += (
                (exchanged + whole * (owned.slot_bytes - owned.matrix_bytes)) * (parts - 1) / parts
            )
    if not layout.splits_params:
        if layout.splits_optimizer and not isinstance(dp.reduction, Wire):
            least += wire_bytes_of_all_reduce(sums_bytes(_split(subject, case), 0), parts) / 2
        return least, least
    gathered = wire_bytes_of_all_reduce(sums_bytes(_of_replica(subject, case), 0), parts) / 2
    return least + (3 * case.micro_batches - 2) * gathered, least


def bytes_needed(subject: Subject, case: Case) -> int:
    """Return the bytes of the sums of loss, metrics and trained gradients, as sent."""
    dp = subject.parallel(case)
    trained = itertools.compress(_of_replica(subject, case), jax.tree.leaves(subject.trained))
    count = len(subject.sums.weighted)
    return sums_bytes(trained, count, dp.reduction, replica_count(dp.mesh))


def _merged_bytes(subject: Subject, case: Case) -> float:
    """Return the bytes that a device sends of metrics that are no means: to all others, each."""
    replicas, size = replica_count(subject.parallel(case).mesh), 0.0
    for merged in subject.sums.rows.values():
        parts = case.micro_batches if merged.grows else 1
        for leaf, by_row in zip(merged.leaves, merged.kind.by_row, strict=True):
            size += leaf.size * leaf.dtype.itemsize * (1 / replicas if by_row else parts)
        size += 0 if merged.mask is None else merged.mask.size * 4 / replicas
    return size * (replicas - 1)


def _split(subject: Subject, case: Case) -> Iterator[jax.ShapeDtypeStruct]:
    """Return the shapes of the parameters whose optimizer state is split."""
    dp, params = subject.parallel(case), subject.abstract(case).params
    where = dp.layout.gradient_shardings(params, dp.mesh)
    split = [split_dim(sharding) is not None for sharding in jax.tree.leaves(where)]
    return itertools.compress(jax.tree.leaves(params), split)


def _of_replica(subject: Subject, case: Case) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the gathered parameters on one device of a replica."""
    found = []
    for leaf in jax.tree.leaves(subject.abstract(case).params):
        entries = [axes_of(PartitionSpec(entry)) for entry in leaf.sharding.spec]
        kept = [tuple(axis for axis in axes if axis not in (DATA, FSDP)) for axes in entries]
        own = NamedSharding(leaf.sharding.mesh, PartitionSpec(*kept))
        found.append(jax.ShapeDtypeStruct(own.shard_shape(leaf.shape), leaf.dtype))
    return found


def check_work(
    subject: Subject, programs: dict[Case, CompiledCase], of_one: CompiledStep, updating: int = 0
) -> Iterator[Check]:
    """Yield a row for each program, comparing the FLOPs on all devices with those of one.

    `updating` are FLOPs of the optimizer, which devices may repeat where no matrix has an owner.
    """
    for case, program in programs.items():
        dp = subject.parallel(case)
        owned = dp.layout.splits_optimizer and owned_nodes(subject.state.opt_state)
        share = updating // dp.mesh.shape[shard_axis(dp.mesh)] if owned else updating
        name, flops = str(case), max(program.step.flops - share, 0)
        if not of_one.flops or not flops:
            yield Check("redundant work", name, SKIP, NO_PRODUCTS)
            continue
        ticks, staged = ticks_of(dp), dp.mesh.shape.get(STAGE, 1) > 1
        times = flops * case.devices / of_one.flops * case.micro_batches / ticks
        text = f"{times:.2f} times the FLOPs of one device, summed over {case.devices}"
        text += _analysed(case)
        if staged:
            text += f"; {ticks} pipeline ticks, each counted as if no stage were idle"
        figures = {"flops_per_device": flops, "flops_of_one": of_one.flops, "ticks": ticks}
        verdict, more, cause = judge_work(
            times,
            case.devices,
            case.devices // replica_count(dp.mesh),
            EVERYTHING,
            _RECOMPUTED if staged else 1.0,
        )
        yield Check("redundant work", name, verdict, text + more, cause, figures)


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
