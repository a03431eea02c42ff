"""`replicax bench`: measure a recipe's step in every mode."""

import dataclasses
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax

import replicax as rx
from replicax.bench import processes
from replicax.bench.bench_result import Bench
from replicax.bench.cases import all_cases, notes_on_cases, possible_modes, usual_modes, weak_rows
from replicax.bench.layouts import AXES, MODES_BY_DEFAULT
from replicax.bench.machine import only_cores, own_cores
from replicax.bench.memory_curve import measure_timeline
from replicax.bench.memory_plot import draw_memory
from replicax.bench.runner import check_source
from replicax.bench.save import read_part, write_bench, write_part
from replicax.cli.flags import Arguments, parse_with_recipe, several_of, shown_as, words
from replicax.cli.output import run_folder, show
from replicax.cli.step_options import StepOptions, check_alone, data_lines, make_host_devices
from replicax.core.ground.job import Alone
from replicax.core.modes.mode_table import MODES
from replicax.errors import ClusterError, ConfigError, MissingDependencyError
from replicax.launch.job_spec import JobSpec
from replicax.launch.supervisor import launch
from replicax.text.arguments import Count, Seed
from replicax.text.table import labelled
from replicax.text.wording import counted
from replicax.train.run.host_memory import keep_freed_memory

MEMORY = "memory.png"
TRACES = "trace"
JOBS = "jobs"


@dataclasses.dataclass(frozen=True)
class BenchOptions(StepOptions):
    """Options of `replicax bench` for any recipe."""

    devices: Annotated[str | None, shown_as("COUNTS", "powers of two up to all")] = None
    """Device counts to measure, as 1,2,4,8; on a CPU they are simulated."""
    processes: Annotated[str | None, shown_as("COUNTS", "none")] = None
    """Process counts, as 1,2: weak scaling on this host, with one core and device per process."""
    modes: Annotated[
        str | None, several_of(MODES, "all but exact; with --processes jit,shard_map")
    ] = None
    """Modes to measure; with exact, a CPU gets one thread per micro-shard in all of them."""
    layouts: Annotated[str | None, several_of(AXES, "the one of --layout")] = None
    """Layouts to compare with one device, in mode jit or --modes; model and stages need rules."""
    rounds: Count = 5
    """Measurements of every step, of about a quarter of a second each."""
    pin: bool = False
    """Pin each simulated device to its own CPU core."""
    profile: bool = False
    """Write a profiler trace of two steps."""
    seed: Seed = 0
    """Seed of the initial model, the data order, and the measurement order."""
    run: Annotated[str | None, shown_as("NAME", "bench, recipe and time")] = None
    """Name of the folder in runs/."""


def bench(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = parse_with_recipe("bench", BenchOptions, arguments)
    if parsed.options.least_devices > 1:
        raise ConfigError(
            "bench with --model-parallel, --stages or --fsdp-size; it creates its own meshes: "
            "leave the flag out, or compare with --layouts"
        )
    check_alone("bench", "it starts its own processes: run it once, with --processes")
    if parsed.options.processes is None:
        _over_devices(parsed)
    else:
        _over_processes(parsed, arguments)
    return 0


def _over_devices(parsed: Arguments[BenchOptions]) -> None:
    options = parsed.options
    if options.layouts is not None and (options.layout != BenchOptions.layout or options.profile):
        other = "--profile" if options.profile else f"--layout {options.layout}"
        raise ConfigError(
            f"--layouts {options.layouts} with {other}, which applies to one layout; leave one of "
            "the two out"
        )
    devices = None if options.devices is None else _counts("--devices", options.devices)
    options.fix_threads(*_modes(options))
    if devices:
        make_host_devices(max(devices))
    if jax.devices()[0].platform == "cpu":
        keep_freed_memory()
    folder = run_folder(options.run, f"bench-{parsed.name}", new=True)
    show(*data_lines(parsed.recipe))
    result = bench_recipe(
        parsed,
        batch_size=parsed.recipe.batch_size,
        devices=devices,
        rounds=options.rounds,
        pin=options.pin,
    )
    show(*str(result).splitlines())
    folder.mkdir(parents=True)
    pictures: list[str] = []
    try:
        if not result.compares_layouts and _draw_memory(parsed, result, folder):
            pictures = [MEMORY]
    finally:  # keep the measurements even if drawing fails
        names = [path.name for path in write_bench(result, folder, pictures=pictures)]
    show(*labelled("see", f"{folder}/ ({', '.join([*names, *pictures])})"))
    for trace in (folder / TRACES).glob("plugins/profile/*/perfetto_trace.json.gz"):
        print(f"trace  {trace}\n       open it in https://ui.perfetto.dev")


def bench_recipe(
    parsed: Arguments[BenchOptions], job: rx.types.Job | None = None, **arguments: Any
) -> Bench:
    """Measure the recipe's step with the given options and further `arguments` of `rx.bench`."""
    options, recipe = parsed.options, parsed.recipe
    settings: dict[str, Any] = {}
    if options.layouts is not None:
        rules = recipe.rules() if hasattr(recipe, "rules") else ()
        layout = rx.layout(rules=rules, schedule=options.schedule)
        names, heads = words(options.layouts), getattr(recipe, "heads", None)
        whole_heads = (layout, over_heads(heads)) if heads else "model"
        arguments["layouts"] = [whole_heads if name == "model" else name for name in names]
        settings["layout"] = layout
    # Each case has its own mesh and mode; these are any that are valid.
    asked, layout = _modes(options), settings.get("layout", options.layout_of(recipe))
    (mode, *_), _ = possible_modes(asked, [1], layout, options.reduction)
    mesh = rx.make_mesh(devices=jax.devices()[:1]) if job is None else None
    return rx.bench(
        options.data_parallel(recipe, mode, mesh, job, **settings),
        recipe.model(jax.random.key(options.seed)),
        recipe.train_source(),
        modes=asked,
        seed=options.seed,
        tokens_per_row=getattr(recipe, "tokens_per_row", None),
        **arguments,
    )


def over_heads(heads: int) -> Callable[[int], jax.sharding.Mesh]:
    """Return `mesh(devices)`, with the most devices along `model` that divide `heads`."""

    def mesh(devices: int) -> jax.sharding.Mesh:
        most = math.gcd(devices, heads)
        if most == 1:
            raise ConfigError(
                f"{devices} devices with heads={heads}; the devices along 'model' must divide the "
                "heads: change one of the two"
            )
        return rx.make_mesh(devices // most, most, devices=jax.devices())

    return mesh


def _over_processes(parsed: Arguments[BenchOptions], arguments: list[str]) -> None:
    options, recipe = parsed.options, parsed.recipe
    for name in ("devices", "layouts", "profile"):
        if getattr(options, name):
            raise ConfigError(
                f"--processes {options.processes} with --{name}; each process has one device and "
                "is measured without a trace: leave one of the two out"
            )
    asked, layout = _modes(options), options.layout_of(recipe)
    counts = processes.check_counts(_counts("--processes", options.processes), asked)
    modes, notes = possible_modes(asked, counts, layout, options.reduction)
    rows = weak_rows(recipe.batch_size, counts)
    cases = all_cases(rows * max(counts), counts, modes, weak=True)
    notes += notes_on_cases(recipe.batch_size, cases, options.settings(recipe)["accumulate"])
    folder = run_folder(options.run, f"bench-{parsed.name}", new=True)
    show(*data_lines(recipe))
    if not check_source(recipe.train_source(), recipe.batch_size, Alone()):
        raise ConfigError(
            f"--processes {options.processes} with a source of fixed batches; each count needs "
            "its own batch size: use arrays or a Grain dataset, or --devices"
        )
    measure = job_measure([sys.executable, "-m", "replicax.cli.bench", *arguments], folder / JOBS)
    result = processes.bench_processes(measure, counts, rounds=options.rounds, notes=notes)
    show(*str(result).splitlines())
    names = [path.name for path in write_bench(result, folder)]
    show(*labelled("see", f"{folder}/ ({', '.join([*names, f'{JOBS}/'])})"))


def job_measure(command: Sequence[str], folder: Path) -> processes.Measure:
    """Return a `Measure` that launches `command` with the path of its result appended.

    The results and the output of the processes go to `folder`.
    """

    def measure(count: int, number: int) -> Bench:
        logs = folder / f"{count}-processes-round-{number + 1}"
        part = logs.absolute() / "part.json"
        job = JobSpec((*command, str(part)), count, devices_per_process=1, pin=True)
        # One core per process; otherwise a single process would use all cores.
        with only_cores(own_cores()[:count]):
            outcome = launch(job, env={**os.environ, "JAX_PLATFORMS": "cpu"}, logs=logs, quiet=True)
        if outcome.stopped_by == "SIGINT":
            raise KeyboardInterrupt
        if outcome.exit_code or not part.exists():
            raise ClusterError(
                f"{logs.name}: {outcome.message or f'no {part.name} was written; see {logs}'}"
            )
        return read_part(part)

    return measure


def _draw_memory(parsed: Arguments[BenchOptions], result: Bench, folder: Path) -> bool:
    """Draw the memory timeline of two executions of a step, if available.

    The step runs on the most devices, in the mode whose program is closest to its source.
    """
    options, recipe = parsed.options, parsed.recipe
    devices = max(case.devices for case in result.cases)
    measured = [case.mode for case in result.cases if case.devices == devices]
    per_replica = (name for name, mode in MODES.items() if mode.per_replica and name in measured)
    mode = next(per_replica, measured[0])
    mesh = rx.make_mesh(devices, devices=jax.devices())
    dp = options.data_parallel(recipe, mode, mesh)
    state = dp.init(recipe.model(jax.random.key(options.seed)), seed=options.seed)
    (batch, *_) = itertools.islice(dp.feed(recipe.train_source(), recipe.batch_size), 1)
    with tempfile.TemporaryDirectory() as temporary:
        traces = folder / TRACES if options.profile else Path(temporary)
        try:
            _, timeline = measure_timeline(dp, state, batch, traces, perfetto=options.profile)
            title = f"{parsed.name} · {counted(devices, 'device')} · {mode}"
            draw_memory(timeline, folder / MEMORY, title)
        except (ConfigError, MissingDependencyError) as error:
            print(f"no {MEMORY}: {error}")
            return False
    return True


def _counts(flag: str, text: str | None) -> list[int]:
    counts = words(text or "")
    if not counts or not all(count.isdecimal() for count in counts):
        raise ConfigError(f"{flag} {text!r}; it must be a list of counts, such as 1,2,4")
    return [int(count) for count in counts]


def _modes(options: BenchOptions) -> list[Any]:
    if options.modes is not None:
        return words(options.modes)
    if options.processes is not None:
        return processes.modes_of_processes()
    return list(usual_modes() if options.layouts is None else MODES_BY_DEFAULT)


def _one_process(arguments: list[str]) -> None:
    """Measure in one of the processes started by `--processes`, on the devices of all of them.

    Process 0 writes the result to the path that follows the command's flags.
    """
    *flags, path = arguments
    parsed = parse_with_recipe("bench", BenchOptions, flags)
    counts = _counts("--processes", parsed.options.processes)
    job = rx.initialize(verbose=False)
    keep_freed_memory()
    result = bench_recipe(
        parsed,
        batch_size=weak_rows(parsed.recipe.batch_size, counts) * jax.device_count(),
        devices=[jax.device_count()],
        rounds=processes.RUNS_OF_A_JOB,
        job=job,
        progress=False,
    )
    if job.process == 0:
        write_part(result, Path(path))


if __name__ == "__main__":
    _one_process(sys.argv[1:])
