"""`replicax launch`: run a command as several processes that train together."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Annotated, Any

from replicax.cli import failed
from replicax.cli.flags import flag_value, one_of, parse, shown_as
from replicax.errors import ConfigError, did_you_mean
from replicax.launch.island_supervisor import RESTARTS_IN_A_ROW
from replicax.launch.job_spec import JobSpec
from replicax.launch.supervisor import GRACE_SECONDS
from replicax.launch.supervisor import launch as launch_here
from replicax.text.arguments import Count, Devices, Natural, Range

ENGINES = ("local", "slurm", "kubernetes", "ray")
EXAMPLE = "replicax launch --processes 2 -- python train.py"
# A line is a paragraph, as tyro joins the lines of one.
HELP = """replicax launch --processes N [OPTIONS] -- COMMAND ...

Starts N processes of COMMAND, which train as one job: if one fails, all end.

With --islands M, M such jobs train together: one that dies restarts alone.

The processes find each other with rx.initialize(), from REPLICAX_* variables.

For the options of a cluster engine: replicax launch --on ENGINE --help"""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Options of `replicax launch` for any engine."""

    on: Annotated[str, one_of(ENGINES)] = ENGINES[0]
    """Where to run: here or on Ray; slurm and kubernetes print a file to submit."""
    processes: Annotated[Count | None, shown_as("N", "1 with --islands, else required")] = None
    """Number of processes; with --islands, of each island."""
    islands: Annotated[Count | None, shown_as("M", "none")] = None
    """Number of islands; one that dies is started again while the others go on."""
    devices_per_process: Annotated[Devices | None, shown_as("N", "none")] = None
    """Number of CPU devices that JAX simulates in each process, to try things out."""
    pin: bool = False
    """Pin each process to its own CPU cores."""
    restarts: Annotated[Natural | None, shown_as("R", "0; with --islands 20")] = None
    """Restarts after a failure; with --islands, of one that dies each time within a minute."""
    name: str = "replicax"
    """Name of the job on a cluster."""


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """How to run it on this host."""

    grace: Annotated[float, Range(0, 7 * 86_400)] = GRACE_SECONDS
    """Seconds that the processes have to exit after Ctrl-C or SIGTERM, until they are killed."""
    logs: Annotated[str | None, shown_as("FOLDER", "a new one in logs/")] = None
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
    asked = getattr(options, "gpus_per_process", 0), options.devices_per_process
    if asked == (None, None):
        line = "no GPUs are asked for: --gpus-per-process 8 asks for 8, and 0 hides this line"
        print(f"replicax: {line}", file=sys.stderr)
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
