"""`replicax launch`: a command as several processes that train together."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from replicax.cli import failed
from replicax.cli.flags import one_of, parse, taken
from replicax.errors import ConfigError, did_you_mean
from replicax.launch.job_spec import JobSpec
from replicax.launch.supervisor import GRACE_SECONDS
from replicax.launch.supervisor import launch as launch_here

ENGINES = ("local", "slurm", "kubernetes", "ray")
EXAMPLE = "replicax launch --processes 2 -- python train.py"
HELP = """replicax launch --processes N [OPTIONS] -- COMMAND ...

Starts COMMAND N times, as processes that train together and end together.

REPLICAX_* variables tell each its rank; rx.initialize() reads them.

--on slurm, kubernetes or ray has options of its own: add --help to it."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Options of `replicax launch` for any engine."""

    on: Annotated[str, one_of(ENGINES)] = ENGINES[0]
    """Where: this host, or a cluster's engine."""
    processes: int | None = None
    """How many in all; always given."""
    devices_per_process: int | None = None
    """Host devices that each process makes."""
    pin: bool = False
    """Give each process processor cores of its own."""
    restarts: int = 0
    """Times that all are started again after a failure."""
    name: str = "replicax"
    """Name of the job in the engine."""


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """How to run it on this host."""

    grace: float = GRACE_SECONDS
    """Seconds that all have to end after Ctrl-C or SIGTERM."""
    logs: str | None = None
    """Folder for what they write; a new one in runs/ by default."""


def launch(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if "--" not in arguments and not {"-h", "--help"} & set(arguments):
        raise ConfigError(f"launch without a command; it comes last, after --: {EXAMPLE}")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags, command = arguments[:end], arguments[end + 1 :]
    name, flags = taken("--on", flags)  # before they are parsed: an engine has some of its own
    name = ENGINES[0] if name is None else name
    if name not in ENGINES:
        raise ConfigError(
            f"--on {name!r}; a job is launched on one of {', '.join(ENGINES)}"
            f"{did_you_mean(name, ENGINES)}"
        )
    engine_options, run = _engine(name)
    # One class with the flags of both, whose instances are options of both.
    both = dataclasses.make_dataclass(
        "Flags", [], bases=(LaunchOptions, engine_options), frozen=True
    )
    both.__doc__ = HELP
    options: Any = parse("launch", both, flags)  # exits where help is asked for
    if not command:
        raise ConfigError(f"nothing after --; the command comes there: {EXAMPLE}")
    if options.processes is None:
        raise ConfigError(f"launch without --processes; say how many: {EXAMPLE}")
    names = [field.name for field in dataclasses.fields(JobSpec) if field.name != "command"]
    job = JobSpec(tuple(command), **{name: getattr(options, name) for name in names})
    code, said = run(job, options)
    return failed(said, code) if said else code


def _engine(name: str) -> tuple[type[Any], Callable[[JobSpec, Any], tuple[int, str | None]]]:
    """The options of an engine, and what a job and those come to: a code, and a message or None."""
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
    if options.grace < 0:
        raise ConfigError(f"--grace {options.grace:g}; it is in seconds, from 0: raise it")
    outcome = launch_here(job, logs=options.logs, grace_seconds=options.grace)
    return outcome.exit_code, outcome.message


def _print(text: str) -> tuple[int, None]:
    print(text.rstrip("\n"))
    return 0, None
