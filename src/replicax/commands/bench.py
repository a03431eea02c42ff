"""`replicax bench`: a recipe's step in every mode, side by side."""

import dataclasses
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import jax

import replicax as rx
from replicax.bench import processes
from replicax.bench.cases import all_cases, modes_with_layout, weak_rows
from replicax.bench.epochs import check_source
from replicax.bench.memory import measure_timeline
from replicax.bench.memory_plot import draw_memory
from replicax.bench.notes import notes_on_cases
from replicax.bench.report import table
from replicax.bench.result import Bench
from replicax.bench.run import USUAL_MODES
from replicax.bench.run import bench as run_bench
from replicax.bench.save import write_bench
from replicax.cluster.place import find_place
from replicax.commands.arguments import Arguments, parse_arguments
from replicax.commands.data import print_data
from replicax.commands.devices import make_host_devices
from replicax.core.exact import MICRO_SHARDS
from replicax.core.threads import fix_threads
from replicax.errors import ConfigError, MissingDependencyError
from replicax.train.host_memory import keep_freed_memory

MEMORY = "memory.png"
TRACES = "trace"
JOBS = "jobs"


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What to measure of a recipe, whichever it is."""

    devices: str | None = None
    """Device counts, as 1,2,4,8; by default the powers of two up to all. On a CPU: host devices."""
    processes: str | None = None
    """Process counts, as 1,2, instead of devices: weak scaling over processes on this host, each
    with a core and a host device of its own."""
    modes: str | None = None
    """Modes, as jit,shard_map; by default all but exact, and these two with --processes. For exact
    a CPU gets 8 threads, in all modes."""
    layout: Literal["replicated", "zero1", "fsdp"] = "replicated"
    """Where the training state lives."""
    accumulate: int = 1
    """Micro-batches that each device computes one after the other."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype the model computes in; parameters and optimizer stay in float32."""
    rounds: int = 5
    """Times that every step is measured, for about a quarter of a second each."""
    pin: bool = False
    """Give each host device a processor core of its own."""
    profile: bool = False
    """Leave a trace of two steps for a trace viewer."""
    seed: int = 0
    """Of the initial model, the order of the data, and that of the measurements."""
    run: str | None = None
    """Name of the folder in runs/; bench, recipe and time by default."""


def bench(arguments: list[str]) -> None:
    """Run the command."""
    parsed = parse_arguments("bench", BenchOptions, arguments)
    if parsed is None:
        return
    options, recipe = parsed.options, parsed.recipe
    _check_alone()
    if options.processes is not None:
        _over_processes(parsed, arguments)
        return
    devices = counts_of("--devices", options.devices)
    if "exact" in modes_of(options):
        fix_threads(MICRO_SHARDS)
    if devices:
        make_host_devices(max(devices))
    if jax.devices()[0].platform == "cpu":
        keep_freed_memory()
    folder = _folder(parsed)
    print_data(recipe)
    result = run_bench(
        recipe.loss,
        recipe.optimizer(),
        recipe.model(jax.random.key(options.seed)),
        recipe.train_source(),
        batch_size=recipe.batch_size,
        devices=devices,
        modes=modes_of(options),
        layout=options.layout,
        accumulate=options.accumulate,
        precision=options.precision,
        rounds=options.rounds,
        pin=options.pin,
        seed=options.seed,
        tokens_per_row=getattr(recipe, "tokens_per_row", None),
    )
    print(*table(result), sep="\n", flush=True)
    folder.mkdir(parents=True)
    pictures = []
    try:
        if _draw_memory(parsed, result, folder):
            pictures = [MEMORY]
    finally:  # what was measured is kept, whatever becomes of the picture
        names = [path.name for path in write_bench(result, folder, pictures=pictures)]
    print(f"see    {folder}/ ({', '.join([*names, *pictures])})")
    for trace in (folder / TRACES).glob("plugins/profile/*/perfetto_trace.json.gz"):
        print(f"trace  {trace}\n       open it in https://ui.perfetto.dev")


def _over_processes(parsed: Arguments[BenchOptions], arguments: list[str]) -> None:
    """The weak scaling over processes; `arguments` are those of the command."""
    options, recipe = parsed.options, parsed.recipe
    for name in ("devices", "profile"):
        if getattr(options, name):
            raise ConfigError(
                f"--processes {options.processes} with --{name}; each process has one device, and "
                "the measurement no trace: leave one of the two out"
            )
    asked = counts_of("--processes", options.processes)
    assert asked, "the flag is there, or this would not be called"
    counts = processes.check_counts(asked, modes_of(options))
    modes, notes = modes_with_layout(modes_of(options), options.layout, counts)
    rows = weak_rows(recipe.batch_size, counts)
    cases = all_cases(rows * max(counts), counts, modes, weak=True)
    notes += notes_on_cases(recipe.batch_size, cases, options.accumulate)
    folder = _folder(parsed)
    print_data(recipe)
    if not check_source(recipe.train_source(), recipe.batch_size):
        raise ConfigError(
            f"--processes {options.processes} with a source of whole batches; each count needs "
            "other batches: give arrays or a Grain dataset, or use --devices"
        )
    measure = processes.job_measure(
        [sys.executable, "-m", "replicax.commands.bench_process", *arguments], folder / JOBS
    )
    result = processes.bench_processes(measure, counts, rounds=options.rounds, notes=notes)
    print(*table(result), sep="\n", flush=True)
    names = [path.name for path in write_bench(result, folder)]
    print(f"see    {folder}/ ({', '.join([*names, f'{JOBS}/'])})")


def _check_alone() -> None:
    """Raise `ConfigError` in a job of several processes, each of which would measure by itself."""
    place = find_place(os.environ)
    if place.processes > 1:
        raise ConfigError(
            f"bench as process {place.process} of {place.processes} ({place.engine}); it starts "
            "processes itself: run it once, with --processes"
        )


def _draw_memory(parsed: Arguments[BenchOptions], result: Bench, folder: Path) -> bool:
    """Draw the memory of one of the steps through two executions, where that can be known.

    It is the step on the most devices, in the mode whose program is nearest to its source.
    """
    options, recipe = parsed.options, parsed.recipe
    devices = max(case.devices for case in result.cases)
    measured = [case.mode for case in result.cases if case.devices == devices]
    mode = "shard_map" if "shard_map" in measured else measured[0]
    dp = rx.DataParallel(
        recipe.loss,
        recipe.optimizer(),
        mesh=rx.make_mesh(devices, devices=jax.devices()),
        mode=mode,
        layout=options.layout,
        accumulate=options.accumulate,
        precision=options.precision,
    )
    state = dp.init(recipe.model(jax.random.key(options.seed)), seed=options.seed)
    (batch, *_) = itertools.islice(dp.feed(recipe.train_source(), recipe.batch_size), 1)
    with tempfile.TemporaryDirectory() as temporary:
        traces = folder / TRACES if options.profile else Path(temporary)
        try:
            _, timeline = measure_timeline(dp, state, batch, traces, perfetto=options.profile)
            title = f"{parsed.name} · {devices} device{'s' if devices > 1 else ''} · {mode}"
            draw_memory(timeline, folder / MEMORY, title)
        except (ConfigError, MissingDependencyError) as error:
            print(f"no {MEMORY}: {error}")
            return False
    return True


def counts_of(flag: str, text: str | None) -> list[int] | None:
    """The counts that `flag` gives.

    Raises:
        ConfigError: no list of counts.
    """
    if text is None:
        return None
    words = _words(text)
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"{flag} {text!r}; it is a list of counts: write 1,2,4")
    return [int(word) for word in words]


def modes_of(options: BenchOptions) -> list[str]:
    """The modes that are asked for."""
    if options.modes is None:
        return list(USUAL_MODES if options.processes is None else processes.MODES)
    return _words(options.modes)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _folder(parsed: Arguments[BenchOptions]) -> Path:
    name = parsed.options.run or f"bench-{parsed.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path("runs") / name
    if folder.exists():
        raise ConfigError(f"{folder} exists; a bench has a folder of its own: choose another name")
    return folder
