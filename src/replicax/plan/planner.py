"""The questions of a plan, one after the other, and what is beside them at once."""

import datetime
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from replicax.core.batch import row_count
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import DATA, is_data_only, replica_count, shard_axis
from replicax.core.partition import Rules
from replicax.errors import ConfigError
from replicax.plan.advice import batch_advice, first_change
from replicax.plan.alternatives import alternatives
from replicax.plan.forecast import device_hours
from replicax.plan.kernel_time import kernel_roofline
from replicax.plan.largest import MOST_ROWS, largest_rows, resolution
from replicax.plan.memory import tree_bytes
from replicax.plan.micro_batches import micro_batches
from replicax.plan.need import Need, holder
from replicax.plan.result import Alternative, MicroBatches, Plan, Scaling, Speed
from replicax.plan.speed import known_dtype, scaling, speed, work
from replicax.plan.steps import Step, Steps, rows_of_a_replica
from replicax.plan.target import Target
from replicax.plan.traffic import Traffic, least_wire_bytes, read_traffic


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
    ) -> None:
        self._dp, self._target, self._steps = dp, target, steps
        self._changes, self._rules = changes, rules
        self._rows, self._tokens_per_row = row_count(batch), tokens_per_row
        state = dp.abstract_state(model)
        self._params = jax.tree.leaves(state.params)
        self._notes: list[str] = []

    def plan(
        self, wished_rows: float | None, noise_scale: float | None, notes: tuple[str, ...]
    ) -> Plan:
        """The whole of it.

        Args:
            wished_rows: as for `replicax.plan.plan.plan`.
            noise_scale: as for `replicax.plan.plan.plan`.
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

        fits, too_large = largest_rows(ask, capacity, asked.rows, slope, unit)
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
            "compiler": self._steps.compiler,
            "jax": jax.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
