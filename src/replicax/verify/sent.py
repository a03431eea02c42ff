"""Collectives of a compiled step by mesh axes, and the bytes that its layout has to send."""

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

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
from replicax.analysis.compiled import Collectives, collective_kind, result_bytes
from replicax.core.mesh import DATA, FSDP, replica_count, shard_axis
from replicax.core.models.definition import View
from replicax.core.partition import axes_of
from replicax.verify.subject import Case, Subject


@dataclasses.dataclass(frozen=True)
class SentOverAxes:
    """All collectives of one kind over the same axes in one step, loops multiplied out."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes, those of one device left out."""
    count: int
    bytes: int
    """Result bytes on one device, summed over the count."""
    between: float
    """Bytes that a device sends, in a ring, for what the replicas have of it."""
    inside: float
    """Bytes that it sends for what the devices of a replica have of it."""


def read_sent(text: str, mesh: Mesh) -> tuple[SentOverAxes, ...]:
    """Return what a step sends that was compiled to `text` for `mesh`."""
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
    # A ring sends 1 - 1 / N of it: that of the replicas alone, and what the rest adds to it.
    share = (1 - 1 / replicas) / (1 - 1 / devices) if devices > 1 else 0.0
    return SentOverAxes(kind, axes, count, size, sent * share, sent - sent * share)


def bytes_of_layout(subject: Subject, case: Case) -> tuple[float, float]:
    """Return the most bytes that a device sends to other replicas under its layout, and the least.

    The least is what reduces the sums once, or scatters them and gathers what follows. A layout
    that splits the parameters gathers them twice for every micro-batch, and scatters then.
    """
    mesh, layout = subject.parallel(case).mesh, subject.parallel(case).layout
    least = wire_bytes_of_all_reduce(bytes_needed(subject, case), replica_count(mesh))
    if not layout.splits_params:
        return least, least
    parts = mesh.shape[shard_axis(mesh)]
    gathered = wire_bytes_of_all_reduce(_bytes_of_params(subject, case), parts) / 2
    return least + (3 * case.micro_batches - 2) * gathered, least


def bytes_needed(subject: Subject, case: Case) -> int:
    """Bytes of the sums of loss, metrics and the gradient that the optimizer reads, as sent."""
    state, batch = subject.state, subject.full
    metrics: Any = jax.eval_shape(
        lambda params, extras, batch: subject.objective.loss_sums(
            params, extras, batch, View(jax.random.key(0))
        )[0],
        *(state.params, state.extras, batch),
    )
    sent = getattr(subject.parallel(case).reduction, "dtype", None)
    trained = itertools.compress(_of_replica(subject, case), jax.tree.leaves(subject.trained))
    return sums_bytes(trained, len(metrics), sent)


def _bytes_of_params(subject: Subject, case: Case) -> int:
    return sums_bytes(_of_replica(subject, case), 0)


def _of_replica(subject: Subject, case: Case) -> list[jax.ShapeDtypeStruct]:
    """The parameters as one device of a replica has them, once they are gathered."""
    found = []
    for leaf in jax.tree.leaves(subject.abstract(case).params):
        entries = [axes_of(PartitionSpec(entry)) for entry in leaf.sharding.spec]
        kept = [tuple(axis for axis in axes if axis not in (DATA, FSDP)) for axes in entries]
        own = NamedSharding(leaf.sharding.mesh, PartitionSpec(*kept))
        found.append(jax.ShapeDtypeStruct(own.shard_shape(leaf.shape), leaf.dtype))
    return found
