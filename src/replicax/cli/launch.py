"""`replicax launch`: run a command as several processes that train together."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from replicax.arguments import Count, Devices, Natural, Range
from replicax.cli import failed
from replicax.cli.flags import flag_value, one_of, parse, shown_as
from replicax.errors import ConfigError, did_you_mean
from replicax.launch.island_supervisor import RESTARTS_IN_A_ROW
from replicax.launch.job_spec import JobSpec
from replicax.launch.supervisor import GRACE_SECONDS
from replicax.launch.supervisor import launch as launch_here

ENGINES = ("local", "slurm", "kubernetes", "ray")
EXAMPLE = "replicax launch --processes 2 -- python train.py"
HELP = """replicax launch --processes N [OPTIONS] -- COMMAND ...

Starts N processes of COMMAND, which train together and end together.

Each gets its rank in REPLICAX_* variables, which rx.initialize() reads.

With --islands M, M islands of N processes each hold a replica of the state and exchange sums; if
one dies, only that one is restarted, and the others go on.

The engines slurm, kubernetes and ray have further options: add --help after --on ENGINE."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Options of `replicax launch` for any engine."""

    on: Annotated[str, one_of(ENGINES)] = ENGINES[0]
    """Where to run: this host, or a cluster engine."""
    processes: Annotated[Count | None, shown_as("N", "none, required")] = None
    """Number of processes; of each island 1, unless it is given."""
    islands: Annotated[Count | None, shown_as("M", "none")] = None
    """Number of islands, each of which is restarted on its own while the others go on."""
    devices_per_process: Annotated[Devices | None, shown_as("N", "none")] = None
    """Number of CPU devices that each process simulates."""
    pin: bool = False
    """Pin each process to its own CPU cores."""
    restarts: Annotated[Natural | None, shown_as("R", "0; of an island 20")] = None
    """Restarts of the whole job after a failure; of an island, those in a row within a minute."""
    name: str = "replicax"
    """Name of the job in the engine."""


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """How to run it on this host."""

    grace: Annotated[float, Range(0, 7 * 86_400)] = GRACE_SECONDS
    """Seconds that the processes have to exit after Ctrl-C or SIGTERM."""
    logs: Annotated[str | None, shown_as("FOLDER", "a new one in runs/")] = None
    """Folder for the output of the processes."""


def launch(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if "--" not in arguments and not {"-h", "--help"} & set(arguments):
        raise ConfigError(f"launch without a command; give it last, after --: {EXAMPLE}")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags, command = arguments[:end], arguments[end + 1 :]
    name, flags = flag_value("--on", flags)  # first, since each engine has its own flags
    name = ENGINES[0] if name is None else name
    if name not in ENGINES:
        raise ConfigError(
            f"--on {name!r}; it must be one of {', '.join(ENGINES)}{did_you_mean(name, ENGINES)}"
        )
    engine_options, run = _engine(name)
    # One class with the flags of both; its instances serve as options of both.
    both = dataclasses.make_dataclass(
        "Flags", [], bases=(LaunchOptions, engine_options), frozen=True
    )
    both.__doc__ = HELP
    options: Any = parse("launch", both, flags)  # exits after --help
    if not command:
        raise ConfigError(f"nothing after --; give the command there: {EXAMPLE}")
    processes, restarts = (None, 0) if options.islands is None else (1, RESTARTS_IN_A_ROW)
    processes = processes if options.processes is None else options.processes
    if processes is None:
        raise ConfigError(f"launch without --processes; give their number: {EXAMPLE}")
    restarts = restarts if options.restarts is None else options.restarts
    names = ("devices_per_process", "pin", "name", "islands")
    others = {name: getattr(options, name) for name in names}
    job = JobSpec(tuple(command), processes, restarts=restarts, **others)
    code, said = run(job, options)
    return failed(said, code) if said else code


def _engine(name: str) -> tuple[type[Any], Callable[[JobSpec, Any], tuple[int, str | None]]]:
    """Return an engine's options and its run function, which returns a code and a message."""
    if name == "local":
        return LocalOptions, _run_here
    if name == "ray":
        from replicax.launch.on_ray import RayOptions, launch_on_ray

        return RayOptions, launch_on_ray
    from replicax.launch import scripts

    if name == "slurm":
        return scripts.SlurmOptions, lambda *given: _print(scripts.slurm_script(*given))
    return scripts.KubernetesOptions, lambda *given: _print(scripts.jobset_manifest(*given))


def _run_here(job: JobSpec, options: LocalOptions) -> tuple[int, str | None]:
    outcome = launch_here(job, logs=options.logs, grace_seconds=options.grace)
    return outcome.exit_code, outcome.message


def _print(text: str) -> tuple[int, None]:
    print(text.rstrip("\n"))
    return 0, None
