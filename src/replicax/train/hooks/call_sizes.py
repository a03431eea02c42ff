"""The number of steps that a run does in each call."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax

from replicax.analysis.flops import count_flops
from replicax.core.data.rows import opened
from replicax.train.dispatched import RunPosition
from replicax.train.folder.program_fingerprint import some_rows
from replicax.train.hooks.hook import Running

MOST_STEPS, FEWEST_STEPS = 64, 8
"""Steps of a call whose size is chosen: more would save nothing, fewer would not pay."""
SMALL_FLOPS = {"cpu": 5e7}
SMALL_FLOPS_OF_OTHERS = 1e10
"""FLOPs of a step of about a millisecond, by platform."""
MOST_BYTES_OF_CALL = 32e6
"""Bytes of the state, and of the batches of a call."""
FEWEST_STEPS_OF_RUN = 2_000
"""In shorter runs, compiling another program takes longer than it saves."""


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """Which steps of a run are one call: only their numbers decide, so a run that resumes does the
    same calls.

    A call ends where the run looks at the state. The first step of a run, whose record is its own,
    is a call by itself, and so are steps before such an end that are fewer than `steps`, unless
    they end each epoch.
    """

    steps: int = 1
    """Steps of a call."""
    batches: int | None = None
    """Batches of an epoch, if known."""
    total: int | None = None
    """Steps of the run, if known."""
    intervals: tuple[int, ...] = ()
    """After each multiple of one of these the state is looked at."""

    def sizes(self, place: RunPosition) -> Callable[[int], int | None]:
        """Return a batch of the epoch of `place`, by number -> the size of the call it begins.

        None for a step by itself.
        """
        begun = place.step - place.batch
        return lambda number: self._size(begun + number, begun)

    def _size(self, step: int, begun: int) -> int | None:
        """Return the steps of the call after `step`; the epoch began after step `begun`."""
        if self.steps == 1 or not step:
            return None
        over = math.inf if self.batches is None else begun + self.batches
        ends = [over, math.inf if self.total is None else self.total]
        starts = [begun, 1]
        for interval in self.intervals:
            starts.append(step // interval * interval)
            ends.append(starts[-1] + interval)
        room = min(ends) - step
        if (step - max(starts)) % self.steps:
            return None
        if room >= self.steps:
            return self.steps
        regular = self.batches is not None and room == over - step == self.batches % self.steps
        return int(room) if regular and room > 1 else None


def call_sizes(
    run: Running, asked: int | None, looks: Mapping[str, int]
) -> tuple[CallSizes, list[str]]:
    """Return the calls of a run, and lines that tell what was chosen.

    `looks` is the number of steps between two after which the state is looked at, by who does.
    """
    intervals, source, lines = tuple(looks.values()), run.source, list[str]()
    if asked is None:
        asked, flops = _chosen(run, intervals)
        if asked > 1:
            about = f"a step has {flops / 1e6:.3g} MFLOPs"
            lines.append(f"calls  {asked} steps each, as {about}; steps_per_call=1 for one by one")
    rounds = run.dp.configuration.rounds
    if rounds is not None and not rounds.sends_gradients:
        looks, intervals = {**looks, "rx.Rounds": 1}, (*intervals, 1)
    if asked > 1 and (single := [name for name, steps in looks.items() if steps == 1]):
        lines.append(f"calls  one step each, as {', '.join(single)} looks at every step")
        asked = 1
    return CallSizes(asked, source.batches, run.total, intervals), lines


def _chosen(run: Running, intervals: Sequence[int]) -> tuple[int, float]:
    """Return how many steps one call should have, and the FLOPs of one.

    Only the program decides, and no clock: a run does the same calls whenever it is started.
    """
    dp, rows, total = run.dp, some_rows(run.source), run.total
    if rows is None or total is None or total < FEWEST_STEPS_OF_RUN or 1 in intervals:
        return 1, math.nan
    program = dp.program(run.state)
    if program.steps is None:
        return 1, math.nan
    size = dp.split.padded(run.source.batch_size)
    batch = program.batches.described(opened(rows).described(size))
    size, held = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in (batch, program.shapes)
    )
    platform = dp.mesh.devices.flat[0].platform
    flops = count_flops(program.step.trace(program.shapes, batch).jaxpr.jaxpr, platform)
    small = held <= MOST_BYTES_OF_CALL and flops <= SMALL_FLOPS.get(platform, SMALL_FLOPS_OF_OTHERS)
    most, together = min(MOST_STEPS, int(MOST_BYTES_OF_CALL // max(size, 1))), math.gcd(*intervals)
    fitting = [n for n in range(most, FEWEST_STEPS - 1, -1) if together % n == 0]
    return (fitting[0] if small and fitting else 1), flops
