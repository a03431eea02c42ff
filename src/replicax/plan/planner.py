"""The questions of a plan, one after the other, and what is beside them at once."""

import datetime
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from replicax.analysis.traffic import sums_bytes
from replicax.core.batch import row_count
from replicax.core.data_parallel import DataParallel
from replicax.core.objective import only_read
from replicax.core.reduction import Wire
from replicax.errors import ConfigError
from replicax.plan.advice import batch_advice, first_change
from replicax.plan.alternatives import alternatives
from replicax.plan.forecast import device_hours
from replicax.plan.kernel_time import kernel_roofline
from replicax.plan.largest import MOST_ROWS, largest_rows, resolution
from replicax.plan.need import Need
from replicax.plan.result import MicroBatches, Plan, Scaling, Speed
from replicax.plan.schedule import Schedule, read_schedule
from replicax.plan.speed import (
    Work,
    known_dtype,
    scaling,
    speed,
    work_by_formula,
    work_of_schedule,
)
from replicax.plan.steps import Step, Steps, rows_of_a_device
from replicax.plan.target import Target
from replicax.plan.traffic import Traffic, least_wire_bytes, read_traffic

MOST_MICRO_BATCHES = 64


class Planner:
    """Puts a plan together, question by question.

    Args:
        dp: the step.
        model: as for `plan`.
        batch: as for `plan`.
        target: the devices.
        steps: of any size, for them.
        changes: as for `plan`.
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
        tokens_per_row: int | None,
    ) -> None:
        self._dp, self._target, self._steps, self._changes = dp, target, steps, changes
        self._rows, self._tokens_per_row = row_count(batch), tokens_per_row
        state = dp.abstract_state(model)
        self._params = jax.tree.leaves(state.params)
        self._trained = jax.tree.leaves(only_read(state.params, dp.program(model).objective.read))
        self._notes: list[str] = []
        self._schedules: dict[int, Schedule] = {}

    def plan(
        self, wished_rows: float | None, noise_scale: float | None, notes: tuple[str, ...]
    ) -> Plan:
        """The whole of it.

        Args:
            wished_rows: as for `replicax.plan.plan.plan`.
            noise_scale: as for `replicax.plan.plan.plan`.
            notes: that it begins with.
        """
        dp, steps = self._dp, self._steps
        chip, devices = self._target.chip, self._target.devices
        self._notes += notes
        asked = self._asked()
        beside = ThreadPoolExecutor(1)  # compilers take long and a core each
        try:
            changed = beside.submit(
                alternatives, steps, dp, asked.need, chip, devices, self._changes
            )
            largest, too_large = self._largest(asked.need)
            micro_batches = self._micro_batches(asked.need, largest)
            others, refused = changed.result()
        finally:  # an interrupt ends the compilers first, and then what waits for them
            beside.shutdown(wait=False)
        if largest is None and too_large is not None and too_large.rows < asked.need.rows:
            # Nothing fits as it is: what would make the least of it fit?
            others, refused = alternatives(steps, dp, too_large, chip, devices, self._changes)
        self._notes += refused
        shown = self._shown(asked.need, largest)
        speeds, grown = self._speeds(shown, noise_scale)
        traffic = self._traffic(shown[0]) if shown else None
        batches = [devices * need.rows for need in (asked.need, largest) if need is not None]
        return Plan(
            about={**self._about(), "noise_scale": noise_scale, "wished_rows": wished_rows},
            target=self._target,
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
            first=first_change(
                dp,
                self._target.chip,
                devices,
                asked.need,
                largest,
                micro_batches,
                others,
                traffic,
                speeds,
            ),
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _asked(self) -> Step:
        devices, unit = self._target.devices, self._steps.unit(self._dp)
        rows = rows_of_a_device(self._rows, devices, unit)
        if rows * devices != self._rows:
            self._notes.append(
                f"a batch of {self._rows:,} rows is planned as {rows * devices:,}: {devices:,} "
                f"devices with {rows:,} each"
            )
        step = self._steps.step(self._dp, rows)
        if step.program is not None:
            self._notes += step.program.notes
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
                f"more than {fits.rows:,} rows a device may fit: memory does not grow by a "
                "straight line, and the search ends after as many compilations as it may take"
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

    def _micro_batches(self, asked: Need, largest: Need | None) -> MicroBatches | None:
        """Micro-batches in which the batch that was asked for fits, about the fewest."""
        if asked.fits or largest is None:
            return None
        count = math.ceil(asked.rows / largest.rows) * self._dp.accumulate
        while count <= min(MOST_MICRO_BATCHES, asked.rows):
            rows = math.ceil(asked.rows / count) * count
            other = self._dp.replace(accumulate=count)
            need = self._steps.step(other, rows, f"accumulate={count}").need
            if need.fits:
                return MicroBatches(count, need)
            count += max(1, count // 4)  # the sums over micro-batches take memory of their own
        return None

    def _shown(self, asked: Need, largest: Need | None) -> list[Need]:
        """Whose speed is told: the batch that was asked for, and the largest."""
        found = [asked] if asked.fits else []
        if largest is not None and largest.rows != asked.rows:
            found.append(largest)
        return found

    def _schedule(self, step: Step) -> Schedule | None:
        if step.compilation is None:
            return None
        rows = step.need.rows
        if rows not in self._schedules:
            self._schedules[rows] = read_schedule(step.compilation.text)
            if unknown := self._schedules[rows].unknown_calls:
                self._notes.append(f"the FLOPs of {', '.join(unknown)} are not counted")
        return self._schedules[rows]

    def _work(self, step: Step, dtype: str) -> Work:
        schedule = self._schedule(step)
        if schedule is not None:
            return work_of_schedule(schedule, self._target, step.need.rows, dtype)
        flops = self._steps.flops(self._dp, step.need.rows)
        return work_by_formula(flops, step.formula, self._sums_bytes(1), self._target, dtype)

    def _speeds(
        self, shown: list[Need], noise_scale: float | None
    ) -> tuple[tuple[Speed, ...], Scaling | None]:
        dtype = known_dtype(self._dp, self._target)
        try:
            works = [self._work(self._steps.step(self._dp, each.rows), dtype) for each in shown]
            speeds = [speed(work, self._target, dtype, self._tokens_per_row) for work in works]
        except ConfigError as error:
            self._notes.append(f"no speed: {error}")
            return (), None
        if not works:
            return (), None
        if dtype != self._dp.precision.name:
            asked, chip = self._dp.precision.name, self._target.chip
            self._notes.append(f"{chip.title} has no units for {asked}: at best as fast as {dtype}")
        if self._target.devices == 1 or self._target.chip.platform == "cpu":
            return tuple(speeds), None  # one device sends nothing, and one host has no more
        try:
            return tuple(speeds), scaling(works[0], self._target, noise_scale)
        except ConfigError as error:
            self._notes.append(f"no scaling: {error}")
            return tuple(speeds), None

    def _traffic(self, shown: Need) -> Traffic | None:
        dp, devices = self._dp, self._target.devices
        step = self._steps.step(dp, shown.rows)
        schedule = self._schedule(step)
        if schedule is None or step.program is None or devices == 1:
            return None
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in self._params)
        least = least_wire_bytes(dp.layout, devices, self._sums_bytes(step.program.metrics), held)
        dtype, chip = known_dtype(dp, self._target), self._target.chip
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

    def _sums_bytes(self, metrics: int) -> int:
        reduction = self._dp.reduction
        sent = reduction.dtype if isinstance(reduction, Wire) else None
        return sums_bytes(self._trained, metrics, sent)

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
