"""`plan`: whether a step fits on a target, its largest batch, and its speed."""

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

import replicax.plan.plan_table  # noqa: F401 - how a plan is printed and shown
from replicax.analysis.host import measured
from replicax.analysis.rates import RATES
from replicax.analysis.roofline import kernel_roofline
from replicax.analysis.schedule import Schedule
from replicax.core.data.given import batch_given, leading_rows, rows_given, size_given
from replicax.core.data.rows import opened
from replicax.core.data_parallel import DataParallel
from replicax.core.placement.mesh import DATA, is_data_only, replica_count, shard_axis
from replicax.core.placement.sharding_rules import Rules
from replicax.core.step.reduction import Wire
from replicax.errors import ConfigError
from replicax.plan.advice import Wanted, batch_advice, change_names, first_change, to_compile
from replicax.plan.compiler import compiler_for
from replicax.plan.island_exchange import IslandExchange, island_exchange
from replicax.plan.memory_formula import Transformer, tree_bytes
from replicax.plan.planned import AT_RATES, LATER_PARTS, Plan, Scaling, Speed
from replicax.plan.site_network import SiteNetwork, parse_network
from replicax.plan.sizes import FoundSizes, Sizes
from replicax.plan.slow_links import SlowLinks, slow_links
from replicax.plan.speed import known_dtype, scaling, speed, work
from replicax.plan.step_traffic import Traffic, least_wire_bytes, read_traffic
from replicax.plan.steps import (
    ShowProgress,
    StepCache,
    TargetStep,
    holder,
    in_fit,
    rows_of_a_replica,
)
from replicax.plan.target import Target, parse_target
from replicax.text.arguments import Count, Int32Count, Positive, typed

_MOST_QUERY = 2**31
"""Elements of a query, beyond which cuDNN's attention returns wrong gradients; `large-attention` in
known_wrong/versions.toml."""


@dataclasses.dataclass
class _Planner:
    """Compute the parts of a plan one by one, noting deviations from the request."""

    dp: DataParallel
    steps: StepCache
    params: list[Any]
    notes: list[str]

    def asked(self, batch_size: int) -> TargetStep:
        replicas, rows = replica_count(self.dp.mesh), rows_of_a_replica(batch_size, self.dp)
        if rows * replicas != batch_size:
            self.notes.append(
                f"a batch of {batch_size:,} rows is padded to {rows * replicas:,}: {replicas:,} "
                f"{holder(self.dp.mesh)}s with {rows:,} each"
            )
        step = self.steps.step(self.dp, rows)
        if (query := _largest_query(step.schedule)) > _MOST_QUERY:
            raise ConfigError(
                f"a query of {query:,} elements in one call of cuDNN's attention, with {rows:,} "
                f"rows per {holder(self.dp.mesh)}; its gradients are wrong above {_MOST_QUERY:,}: "
                "use fewer rows, or more micro-batches (accumulate)"
            )
        if step.program is not None:
            self.notes += step.program.notes
            for name, value in step.program.options.items():
                self.notes.append(f"compiled with {name}={value}, as on such devices")
        return step

    def planned(
        self,
        step: TargetStep,
        found: FoundSizes,
        about: Mapping[str, Any],
        sites: SiteNetwork | None,
    ) -> Plan:
        """Return the plan with what is found so far."""
        dp, steps, islands = self.dp, self.steps, about["islands"]
        noise, wished = about["noise_scale"], about["wished_rows"]
        shown = [step] if step.need.fits else []
        if found.largest is not None and found.largest.rows != step.need.rows:
            shown.append(steps.step(dp, found.largest.rows))
        speeds, grown = self.speeds(shown, about["tokens_per_row"], noise)
        traffic = self.traffic(shown[0]) if shown else None
        sizes = filter(None, (step.need, found.largest))
        batches = [replica_count(dp.mesh) * need.rows for need in sizes]
        exchange = None if islands is None else self.islands(islands, sites, step, speeds)
        slow = None if sites is None else self.slow_links(islands, sites, step, speeds)
        compiled = steps.compiler.note if steps.compiler is not None and not found.left else ""
        planned = Plan(
            about={**_about(dp, steps, self.params), **about},
            target=steps.target,
            mesh=dict(dp.mesh.shape),
            asked=step.need,
            formula=step.formula,
            largest=found.largest,
            too_large=found.too_large,
            sizes=steps.needs(dp),
            micro_batches=found.micro_batches,
            alternatives=found.alternatives,
            traffic=traffic,
            speeds=speeds,
            scaling=grown,
            device_hours=_device_hours(wished, speeds, steps.target),
            batches=batch_advice(about["batch_size"], batches, noise),
            first="",
            notes=tuple(filter(None, dict.fromkeys([*self.notes, compiled]))),
            islands=exchange,
            slow_links=slow,
            left=found.left,
        )
        return dataclasses.replace(planned, first="" if found.left else first_change(dp, planned))

    def speeds(
        self, shown: list[TargetStep], tokens_per_row: int | None, noise_scale: float | None
    ) -> tuple[tuple[Speed, ...], Scaling | None]:
        steps, dp, target = self.steps, self.dp, self.steps.target
        if not shown:
            return (), None
        try:
            works = [work(steps, step) for step in shown]
            again = steps.recomputed_share(dp, shown[0].need.rows)
            speeds = tuple(speed(each, target, dp, tokens_per_row, again) for each in works)
        except ConfigError as error:
            self.notes.append(f"no speed: {error}")
            return (), None
        self._note_omissions([step.schedule for step in shown])
        if target.devices == 1 or target.chip.platform == "cpu":
            return speeds, None  # one device sends nothing, and a host has no more devices
        try:
            return speeds, scaling(works[0], target, dp.mesh, noise_scale)
        except ConfigError as error:
            self.notes.append(f"no scaling: {error}")
            return speeds, None

    def _note_omissions(self, schedules: list[Schedule | None]) -> None:
        """Note what the speed does not count."""
        dp, chip = self.dp, self.steps.target.chip
        if chip.platform == "cuda" and None not in schedules:
            rates = RATES.get(chip.name)
            reached = f"no kernel was measured on {chip.title}; `make gpu` does"
            if rates is not None:
                reached = f"{AT_RATES}: as fast as such kernels ran alone, {rates.source}"
            self.notes.append(f"at best: each kernel at the data sheet's peaks; {reached}")
        unknown = {name for each in schedules if each is not None for name in each.unknown_calls}
        if unknown:
            self.notes.append(f"the FLOPs of {', '.join(sorted(unknown))} are not counted")
        if None in schedules and not is_data_only(dp.mesh):
            self.notes.append("communication between the devices of a replica is not counted")
        if max(map(_largest_query, schedules), default=0) > _MOST_QUERY:
            self.notes.append(
                f"with the most rows, gradients of cuDNN's attention are wrong: more than "
                f"{_MOST_QUERY:,} elements of a query"
            )
        dtype, wanted = known_dtype(dp, chip), dp.precision.name
        if dtype != wanted:
            self.notes.append(f"{chip.title} has no {wanted} units: at best as fast as {dtype}")

    def traffic(self, step: TargetStep) -> Traffic | None:
        dp, chip, devices = self.dp, self.steps.target.chip, self.steps.target.devices
        if step.schedule is None or step.program is None or devices == 1:
            return None
        least, dtype = 0.0, known_dtype(dp, chip)
        if is_data_only(dp.mesh):
            gathered = dp.precision.to_compute if dp.layout.splits_params else lambda tree: tree
            held = tree_bytes(jax.eval_shape(gathered, self.params))
            sums = self.steps.sums_bytes(dp, step.program.metrics)
            if dp.layout.splits_optimizer and not isinstance(dp.reduction, Wire):
                sums *= 2  # summed whole, before each replica takes its part
            copies = dp.mesh.shape[DATA] if shard_axis(dp.mesh) != DATA else 1
            least = least_wire_bytes(dp.layout, devices, sums, held, copies)
        known = chip.flops_per_second and chip.memory_bytes_per_second
        return read_traffic(
            step.schedule,
            devices,
            least,
            self.params,
            mode=dp.mode,
            layout=dp.layout,
            seconds=(lambda kernel: kernel_roofline(kernel, chip, dtype).seconds)
            if known
            else None,
        )

    def islands(
        self,
        islands: int,
        network: SiteNetwork | None,
        step: TargetStep,
        speeds: tuple[Speed, ...],
    ) -> IslandExchange:
        metrics = step.program.metrics if step.program is not None else 1
        sums = self.steps.island_sums_bytes(self.dp, metrics)
        self.notes.append(
            f"memory and speed are those of one island with the whole batch; with {islands} "
            f"islands, each computes parts of 1/{self.dp.micro_shards} of it, one by one"
        )
        known = speeds and speeds[0].rows == step.need.rows
        seconds = speeds[0].step.seconds if known else None
        return island_exchange(islands, self.dp.micro_shards, sums, network, seconds)

    def slow_links(
        self,
        islands: int | None,
        network: SiteNetwork,
        step: TargetStep,
        speeds: tuple[Speed, ...],
    ) -> SlowLinks:
        """Return all methods over a network, with the batch split among the islands.

        A batch that does not fit is computed at the speed of the largest that does.
        """
        count = network.islands if islands is None else islands
        if network.sites and count != len(network.sites):
            raise ConfigError(
                f"islands={count} with a network of {len(network.sites)} sites, "
                f"{', '.join(network.sites)}; an island is a site: leave islands out"
            )
        rows = step.need.rows / count
        own = speeds[0].step.seconds / speeds[0].rows * rows if speeds else None
        return slow_links(self.params, own, network, count)


@typed
def plan(
    dp: DataParallel,
    model: Any,
    source: Any,
    *,
    target: str | Target,
    batch_size: Int32Count | None = None,
    changes: Mapping[str, DataParallel] | None = None,
    rules: Rules = (),
    tokens_per_row: Count | None = None,
    data_rows: Count | None = None,
    wished_rows: Positive | None = None,
    noise_scale: Positive | None = None,
    transformer: Transformer | None = None,
    islands: Count | None = None,
    network: str | Mapping[str, str] | None = None,
    by_formula: bool = False,
    compile_alternatives: Wanted = False,
    show: ShowProgress | None = None,
    show_plan: Callable[[Plan], None] | None = None,
) -> Plan:
    """Plan whether a step fits a target, the largest batch that does, and how fast it can be.

    The step is that of `rx.fit`, which skips bad updates. It is exported here and compiled by the
    target's compiler in a separate process; nothing runs, and the target's devices need not be
    attached. If its compiler is not installed or does not exist, the plan is by formula, and
    `Plan.notes` says what to install.

    Examples:
        >>> found = rx.plan(dp, model, source, batch_size=32, target="h100:8", by_formula=True)
        >>> print(found.fits, found.asked.rows)
        True 4

    Args:
        dp: the step, on a mesh of any devices. On the target, `data` is resized to fill the devices
            and the other axes keep their sizes.
        model: as for `dp.init`; arrays or their shapes.
        source: as for `dp.feed`, or a feed; or the global batch itself, a pytree of arrays
            `[rows, ...]`. Instead of arrays, their shapes.
        target: `h100:8`, `v5e:16x16`, `cpu:8`, `attached`; see docs/plan.md.
        batch_size: rows of the global batch; without it, the source is the batch.
        changes: steps to compare with, by name of the change; they take the same model and batch.
            Precision and layout are always compared, and `jax.checkpoint` on the whole loss if this
            is None.
        rules: as for `rx.layout`; used to try splitting layers and stages if `dp` has no rules.
        tokens_per_row: tokens per row, to report tokens per second.
        data_rows: rows of the dataset; no larger batch is suggested. With `batch_size`, by default
            those of the source.
        wished_rows: total rows to train on; the plan reports the device-hours.
        noise_scale: the gradient noise scale in rows, if a run measured it.
        transformer: the sizes of a transformer, to add the back-of-the-envelope formula.
        islands: number of islands, each of which is such a target and computes parts of the batch;
            the plan then has the bytes of their exchange.
        network: the network between islands (two, unless `islands` or pairs of sites say more), to
            forecast every method of training over it: the rate of each and the round-trip time,
            such as `100 Mbit/s, 20 ms`, or those of each pair of sites, such as
            `{"paris-oslo": "100 Mbit/s, 30 ms"}`.
        by_formula: do not use the compiler.
        compile_alternatives: compile the changes too, all or those named (`layout=fsdp`); the
            others are by formula, scaled to the compiled step.
        show: called with a line of progress before each step.
        show_plan: called with the plan so far, by formula while the requested batch is compiled,
            as soon as it is known, and again with each further part; `Plan.left` names those that
            are left.

    Raises:
        ConfigError: an unknown target, or a size that its chip does not come in; a compiler of
            another version than jax requires; mesh axes that do not divide the devices; several
            processes; rows or a noise scale not above 0; a `network` without units; an unknown name
            in `compile_alternatives`, or the flag with `by_formula`.
        CompilerError: the compiler fails.
    """
    _check(wished_rows, noise_scale)
    if by_formula and compile_alternatives:
        raise ConfigError("compile_alternatives with by_formula, which compiles nothing: keep one")
    sites = None if network is None else parse_network(network)
    target = parse_target(target) if isinstance(target, str) else target
    dp = in_fit(dp, model, target)
    if changes is not None:
        changes = {name: in_fit(other, model, target) for name, other in changes.items()}
    if target.chip.platform == "cpu":
        target = dataclasses.replace(target, chip=measured(target.chip, target.devices))
    if (size := size_given(source, batch_size)) is None:
        batch = batch_given(source)
        size = opened(batch).count
    else:
        batch = leading_rows(source, 1)
        data_rows = rows_given(source) if data_rows is None else data_rows
    params = jax.tree.leaves(dp.abstract_state(model).params)
    about = {
        "batch_size": size,
        "tokens_per_row": tokens_per_row,
        "data_rows": data_rows,
        "noise_scale": noise_scale,
        "wished_rows": wished_rows,
        "islands": islands,
    }
    with compiler_for(target, by_formula) as (compiler, notes):
        steps = StepCache(model, batch, target, compiler, show or (lambda text: None))
        planner = _Planner(dp, steps, params, list(notes))
        rows = rows_of_a_replica(size, dp)
        names = change_names(dp, steps, rows, changes, rules)
        to_compile(names, compile_alternatives)  # refuses unknown names before anything compiles
        if compiler is not None and show_plan is not None and not steps.is_hopeless(dp, rows):
            soon = steps.by_formula(dp, rows)
            show_plan(planner.planned(soon, FoundSizes(("", *LATER_PARTS)), about, sites))
        step = planner.asked(size)
        sizes = Sizes(dp, steps, planner.notes)
        for found in sizes.found(step.need, data_rows, changes, rules, compile_alternatives):
            planned = planner.planned(step, found, about, sites)
            if transformer and target.chip.usable_bytes:
                paper = transformer.on_paper(tree_bytes(params), target.chip.usable_bytes)
                planned = dataclasses.replace(planned, on_paper=paper)
            if show_plan is not None:
                show_plan(planned)
    return planned


def _check(wished_rows: float | None, noise_scale: float | None) -> None:
    if jax.process_count() > 1:
        raise ConfigError(
            f"plan on {jax.process_count()} processes; it must run in one, for any number of hosts"
        )
    for name, value in (("wished_rows", wished_rows), ("noise_scale", noise_scale)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}; it must be a finite number of rows above 0")


def _about(dp: DataParallel, steps: StepCache, params: list[Any]) -> dict[str, Any]:
    return {
        "target": steps.target.text,
        **dp.configuration.names(),
        "parameters": sum(leaf.size for leaf in params),
        "compiler": None if steps.compiler is None else steps.compiler.name,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _largest_query(schedule: Schedule | None) -> int:
    return max((each.query for each in schedule.kernels), default=0) if schedule else 0


def _device_hours(rows: float | None, speeds: tuple[Speed, ...], target: Target) -> float | None:
    if not rows or not speeds:
        return None
    return rows / speeds[0].rows_per_second * target.devices / 3600
