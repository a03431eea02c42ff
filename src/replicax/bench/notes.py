"""What a reader of the figures must know: what is not as asked, and what they do not mean."""

import os
from collections.abc import Sequence

import jax

from replicax.bench.cases import Case, weak_rows
from replicax.bench.cores import core_count
from replicax.core.feed import Split

NEIGHBOURS_TO_NOTE = 0.05
"""Share of the machine's cores from which other processes are worth a note."""


def notes_on_cases(batch_size: int, cases: Sequence[Case], accumulate: int) -> list[str]:
    """On rows that do not divide.

    Raises:
        ConfigError: a batch with fewer rows than there are micro-batches over its devices.
    """
    notes = []
    most = max(case.replicas for case in cases)
    Split(most, accumulate).padded(batch_size)  # the smallest parts; what it refuses, it explains
    rows = weak_rows(batch_size, [most])
    if rows * most != batch_size and any("weak" in case.scalings for case in cases):
        notes.append(
            f"{batch_size} rows do not divide over {most} devices: the weak scaling has {rows} "
            f"rows on each, {rows * most} on {most}"
        )
    for case in cases:
        size, padded = case.global_batch, Split(case.replicas, accumulate).padded(case.global_batch)
        if padded > size:
            where = f"{case.replicas} {'devices' if case.replicas == case.devices else 'replicas'}"
            micro = f" x {accumulate} micro-batches" if accumulate > 1 else ""
            notes.append(f"{size} rows are padded to {padded} on {where}{micro}")
    return list(dict.fromkeys(notes))


def notes_on_source(can_be_cut: bool, counts: Sequence[int]) -> list[str]:
    """On a source that decides the batch size itself."""
    if can_be_cut or len(counts) == 1:
        return []
    return ["no weak scaling: the source gives whole batches, which cannot be cut to other sizes"]


def notes_on_neighbours(cores: float | None) -> list[str]:
    """On other processes that had `cores` cores on average while this measured."""
    if cores is None or cores < NEIGHBOURS_TO_NOTE * (os.cpu_count() or 1):
        return []
    return [
        f"other processes used {cores:.1f} of the machine's {os.cpu_count()} cores meanwhile: "
        "times are too long and efficiency is off; measure again on an idle machine"
    ]


def notes_on_machine(most: int, platform: str, pinned: bool) -> list[str]:
    """On the devices of this machine, and on what is not measured with them.

    Args:
        most: the highest device count.
        platform: `cpu`, `gpu` or `tpu`.
        pinned: whether each host device has a core of its own.
    """
    notes = []
    if platform == "cpu" and most > 1 and not pinned:
        cores = core_count()
        pin = (
            "--pin gives each device a core"
            if most <= cores
            else f"--pin, which gives each device a core, needs {most}"
        )
        notes.append(
            f"{most} devices share {cores} cores: efficiency is not that of {most} machines; {pin}"
        )
    if platform != "cpu":
        notes.append(
            f"FLOP/s are of the work that the step asks for: a {platform.upper()}'s compiler hides "
            "what it makes of it"
        )
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        notes.append("JAX's compilation cache is on: a compile time may be that of reading it")
    return notes
