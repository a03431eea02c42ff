"""`plan`: does a step fit hardware that need not be there, how large a batch, and how fast?"""

import dataclasses
import datetime
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from replicax.analysis.host import measured
from replicax.analysis.roofline import kernel_roofline
from replicax.core.batch import row_count
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import DATA, is_data_only, replica_count, shard_axis
from replicax.core.partition import Rules
from replicax.errors import ConfigError
from replicax.plan.advice import alternatives, batch_advice, first_change
from replicax.plan.compiler import compiler_for
from replicax.plan.forecast import device_hours
from replicax.plan.largest import MOST_ROWS, largest_rows, micro_batches, resolution
from replicax.plan.memory_formula import (
    Transformer,
    rows_that_fit,
    transformer_activation_bytes,
    tree_bytes,
)
from replicax.plan.planned import (
    Alternative,
    MicroBatches,
    Need,
    OnPaper,
    Plan,
    Scaling,
    Speed,
    holder,
)
from replicax.plan.speed import known_dtype, scaling, speed, work
from replicax.plan.step_traffic import Traffic, least_wire_bytes, read_traffic
from replicax.plan.steps import Show, Step, Steps, in_fit, rows_of_a_replica
from replicax.plan.target import Target, parse_target


class Planner:
    """Puts a plan together, question by question.

    Args:
        dp: the step.
        model: as for `plan`.
        batch: as for `plan`.
        target: the devices.
        steps: of any size, for them.
        changes: as for `plan`.
        rules: as for `plan`.
        tokens_per_row: as for `plan`.
        data_rows: as for `plan`.
    """

    def __init__(
        self,
        dp: DataParallel,
        model: Any,
        batch: Any,
        target: Target,
        steps: Steps,
        changes: Mapping[str, DataParallel] | None,
        rules: Rules,
        tokens_per_row: int | None,
        data_rows: int | None,
    ) -> None:
        self._dp, self._target, self._steps = dp, target, steps
        self._changes, self._rules = changes, rules
        self._rows, self._tokens_per_row = row_count(batch), tokens_per_row
        self._data_rows = data_rows
        state = dp.abstract_state(model)
        self._params = jax.tree.leaves(state.params)
        self._notes: list[str] = []

    def plan(
        self, wished_rows: float | None, noise_scale: float | None, notes: tuple[str, ...]
    ) -> Plan:
        """The whole of it.

        Args:
            wished_rows: as for `replicax.plan.planner.plan`.
            noise_scale: as for `replicax.plan.planner.plan`.
            notes: that it begins with.
        """
        dp, steps, devices = self._dp, self._steps, self._target.devices
        self._notes += notes
        asked = self._asked()
        beside = ThreadPoolExecutor(1)  # compilers take long and a core each
        try:
            changed = beside.submit(self._alternatives, asked.need)
            largest, too_large = self._largest(asked.need)
            micro_batches = self._micro_batches(asked.need, largest)
            others, refused = changed.result()
        finally:  # an interrupt ends the compilers first, and then what waits for them
            beside.shutdown(wait=False)
        if largest is None and too_large is not None and too_large.rows < asked.need.rows:
            # Nothing fits as it is: what would make the least of it fit?
            others, refused = self._alternatives(too_large)
        self._notes += refused
        shown = self._shown(asked.need, largest)
        speeds, grown = self._speeds(shown, noise_scale)
        traffic = self._traffic(shown[0]) if shown else None
        replicas = replica_count(dp.mesh)
        batches = [replicas * need.rows for need in (asked.need, largest) if need is not None]
        return Plan(
            about={**self._about(), "noise_scale": noise_scale, "wished_rows": wished_rows},
            target=self._target,
            mesh=dict(dp.mesh.shape),
            asked=asked.need,
            formula=asked.formula,
            largest=largest,
            too_large=too_large,
            sizes=steps.needs(dp),
            micro_batches=micro_batches,
            alternatives=others,
            traffic=traffic,
            speeds=speeds,
            scaling=grown,
            device_hours=(
                device_hours(wished_rows, speeds[0].rows_per_second, devices)
                if wished_rows and speeds
                else None
            ),
            batches=batch_advice(self._rows, batches, noise_scale),
            first=first_change(dp, asked.need, largest, micro_batches, others, traffic, speeds),
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _asked(self) -> Step:
        replicas, unit = replica_count(self._dp.mesh), self._steps.unit(self._dp)
        rows = rows_of_a_replica(self._rows, replicas, unit)
        if rows * replicas != self._rows:
            self._notes.append(
                f"a batch of {self._rows:,} rows is planned as {rows * replicas:,}: {replicas:,} "
                f"{holder(self._dp.mesh)}s with {rows:,} each"
            )
        step = self._steps.step(self._dp, rows)
        if step.program is not None:
            self._notes += step.program.notes
            for name, value in step.program.options.items():
                self._notes.append(f"compiled with {name}={value}, as the step is on such devices")
        return step

    def _largest(self, asked: Need) -> tuple[Need | None, Need | None]:
        capacity, unit = self._steps.capacity_bytes, self._steps.unit(self._dp)
        if capacity is None:
            self._notes.append("how much memory this target has is not known: nor what fits")
            return None, None
        slope = self._bytes_per_row(asked.rows, capacity, unit)

        def ask(rows: int) -> Need:
            return self._steps.step(self._dp, rows, "largest batch").need

        most = MOST_ROWS
        if self._data_rows is not None:
            most = max(asked.rows, min(most, self._data_rows // replica_count(self._dp.mesh)))
        fits, too_large = largest_rows(ask, capacity, asked.rows, slope, unit, most)
        if fits and too_large and too_large.rows - fits.rows > resolution(fits.rows, unit):
            self._notes.append(
                f"more than {fits.rows:,} rows a {holder(self._dp.mesh)} may fit: memory does not "
                "grow by a straight line, and the search ends after as many compilations as it may "
                "take"
            )
        return fits, too_large

    def _bytes_per_row(self, rows: int, capacity: int, unit: int) -> float:
        """By formula, between `rows` and those that fill the memory: small batches tell little."""

        def total(rows: int) -> int:
            return self._steps.formula(self._dp, rows).total

        most = 2 * rows
        for _ in range(2):
            slope = max(1.0, (total(most) - total(rows)) / (most - rows))
            full = min(int(rows + max(0, capacity - total(rows)) / slope), MOST_ROWS)
            most = max(full // unit * unit, 2 * rows)
        return slope

    def _alternatives(self, asked: Need) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
        return alternatives(self._steps, self._dp, asked, self._changes, self._rules)

    def _micro_batches(self, asked: Need, largest: Need | None) -> MicroBatches | None:
        if asked.fits or largest is None:
            return None
        fewest = math.ceil(asked.rows / largest.rows) * self._dp.accumulate
        return micro_batches(self._steps, self._dp, asked.rows, fewest)

    def _shown(self, asked: Need, largest: Need | None) -> list[Need]:
        """Whose speed is told: the batch that was asked for, and the largest."""
        found = [asked] if asked.fits else []
        if largest is not None and largest.rows != asked.rows:
            found.append(largest)
        return found

    def _speeds(
        self, shown: list[Need], noise_scale: float | None
    ) -> tuple[tuple[Speed, ...], Scaling | None]:
        try:
            steps, dp, tokens = self._steps, self._dp, self._tokens_per_row
            works = [work(steps, steps.step(dp, each.rows)) for each in shown]
            again = steps.recomputed_share(dp, shown[0].rows) if shown else None
            speeds = [speed(each, self._target, dp, tokens, again) for each in works]
        except ConfigError as error:
            self._notes.append(f"no speed: {error}")
            return (), None
        if not works:
            return (), None
        self._note_what_is_not_counted(shown)
        dtype = known_dtype(self._dp, self._target.chip)
        if dtype != self._dp.precision.name:
            asked, chip = self._dp.precision.name, self._target.chip
            self._notes.append(f"{chip.title} has no units for {asked}: at best as fast as {dtype}")
        if self._target.devices == 1 or self._target.chip.platform == "cpu":
            return tuple(speeds), None  # one device sends nothing, and one host has no more
        try:
            return tuple(speeds), scaling(works[0], self._target, self._dp.mesh, noise_scale)
        except ConfigError as error:
            self._notes.append(f"no scaling: {error}")
            return tuple(speeds), None

    def _note_what_is_not_counted(self, shown: list[Need]) -> None:
        found = [self._steps.step(self._dp, each.rows).schedule for each in shown]
        unknown = {name for each in found if each is not None for name in each.unknown_calls}
        if unknown:
            self._notes.append(f"the FLOPs of {', '.join(sorted(unknown))} are not counted")
        if None in found and not is_data_only(self._dp.mesh):
            self._notes.append("what the devices of a replica send each other is not counted")

    def _traffic(self, shown: Need) -> Traffic | None:
        dp, devices = self._dp, self._target.devices
        step = self._steps.step(dp, shown.rows)
        schedule = step.schedule
        if schedule is None or step.program is None or devices == 1:
            return None
        least = 0.0
        if is_data_only(dp.mesh):
            gathered = dp.precision.to_compute if dp.layout.splits_params else lambda tree: tree
            held = tree_bytes(jax.eval_shape(gathered, self._params))
            sums = self._steps.sums_bytes(dp, step.program.metrics)
            copies = dp.mesh.shape[DATA] if shard_axis(dp.mesh) != DATA else 1
            least = least_wire_bytes(dp.layout, devices, sums, held, copies)
        chip = self._target.chip
        dtype = known_dtype(dp, chip)
        known = chip.flops_per_second and chip.memory_bytes_per_second
        return read_traffic(
            schedule,
            devices,
            least,
            self._params,
            mode=dp.mode,
            layout=dp.layout,
            seconds=(lambda kernel: kernel_roofline(kernel, chip, dtype).seconds)
            if known
            else None,
        )

    def _about(self) -> dict[str, Any]:
        return {
            "target": self._target.text,
            **self._dp.configuration.names(),
            "parameters": sum(leaf.size for leaf in self._params),
            "batch_size": self._rows,
            "tokens_per_row": self._tokens_per_row,
            "data_rows": self._data_rows,
            "compiler": self._steps.compiler,
            "jax": jax.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }


def plan(
    dp: DataParallel,
    model: Any,
    batch: Any,
    *,
    target: str | Target,
    changes: Mapping[str, DataParallel] | None = None,
    rules: Rules = (),
    tokens_per_row: int | None = None,
    data_rows: int | None = None,
    wished_rows: float | None = None,
    noise_scale: float | None = None,
    transformer: Transformer | None = None,
    by_formula: bool = False,
    show: Show | None = None,
) -> Plan:
    """Whether a step fits a target, the largest batch that does, and how fast it can be.

    The step is that of `rx.fit`, which skips bad updates. It is exported here and compiled by the
    target's own compiler in a process of its own; nothing runs, and no device of the target need be
    there. Where its compiler is not installed, or there is none, the plan is by formula, and
    `Plan.notes` says what to install.

    Args:
        dp: the step; its own mesh may be of any devices. On those of the target the other axes keep
            their sizes, and `data` has what they leave.
        model: as for `dp.init`; arrays or their shapes.
        batch: a pytree of arrays `[rows, ...]`, or of their shapes: the global batch.
        target: `h100:8`, `v5e:16x16`, `cpu:8`, `attached`; see `replicax.plan.target`.
        changes: steps to compare with, by what is changed; they take the same model and batch.
            Precision and layout are always among them, and `jax.checkpoint` on the whole loss where
            none is given.
        rules: as for `rx.layout`: where `dp` has none, layers and stages are tried by them.
        tokens_per_row: where tokens are counted.
        data_rows: of the data: no larger batch is advised.
        wished_rows: to train on in all: the plan tells the device-hours.
        noise_scale: the gradient noise scale in rows, where a run measured it.
        transformer: the sizes of one, to put the formula that is used on paper beside the rest.
        by_formula: leave the compiler out.
        show: told what is next, a line at a time.

    Raises:
        ConfigError: an unknown target, or one that its chip does not come in; a compiler of another
            version than jax wants; axes of the mesh that do not divide the devices; several
            processes; rows or a noise scale that are not above 0.
        CompilerError: the compiler fails.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"plan on {jax.process_count()} processes; one can plan for any number: start it alone"
        )
    for name, value in (("wished_rows", wished_rows), ("noise_scale", noise_scale)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}; it is a number of rows above 0: give one")
    show = show or (lambda text: None)
    aim = parse_target(target) if isinstance(target, str) else target
    dp = in_fit(dp, model, aim)
    if changes is not None:
        changes = {name: in_fit(other, model, aim) for name, other in changes.items()}
    if aim.chip.platform == "cpu":
        aim = dataclasses.replace(aim, chip=measured(aim.chip, aim.devices))
    with compiler_for(aim, by_formula) as (compiler, notes):
        steps = Steps(model, batch, aim, compiler, show)
        planner = Planner(dp, model, batch, aim, steps, changes, rules, tokens_per_row, data_rows)
        found = planner.plan(wished_rows, noise_scale, notes)
    held = tree_bytes(dp.abstract_state(model).params)
    return dataclasses.replace(found, on_paper=_on_paper(aim, held, transformer))


def _on_paper(
    target: Target, parameter_bytes: int, transformer: Transformer | None
) -> OnPaper | None:
    capacity = target.chip.usable_bytes
    if transformer is None or capacity is None:
        return None
    each = transformer_activation_bytes(parameter_bytes, 1, **dataclasses.asdict(transformer))
    return OnPaper(each, rows_that_fit(capacity, parameter_bytes, each))
