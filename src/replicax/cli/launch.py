"""`replicax launch`: a command as several processes that train together."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from replicax.cli.flags import parse
from replicax.cli.output import failed
from replicax.errors import ConfigError, did_you_mean
from replicax.launch.job import Job
from replicax.launch.supervisor import GRACE_SECONDS
from replicax.launch.supervisor import launch as launch_here

PROGRAM = "replicax launch"
EXAMPLE = f"{PROGRAM} --processes 2 -- python train.py"
HELP = """replicax launch --processes N [OPTIONS] -- COMMAND ...

Starts COMMAND N times, as processes that train together and end together.

Each finds its place in REPLICAX_* variables; rx.initialize() reads them.

--on slurm, kubernetes or ray has options of its own: add --help to it."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """What to launch, wherever that is."""

    on: Literal["local", "slurm", "kubernetes", "ray"] = "local"
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
    """What the engine calls the job."""


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """How to run it on this host."""

    grace: float = GRACE_SECONDS
    """Seconds that all have to end after Ctrl-C or SIGTERM."""
    logs: str | None = None
    """Folder for what they write; a new one in runs/ by default."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """Where a job can be launched.

    Args:
        options: a dataclass; its fields are flags beside those of every launch.
        run: a job and those options -> the exit code, and what to say of the end or None.
    """

    options: type[Any]
    run: Callable[[Job, Any], tuple[int, str | None]]


def launch(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if "--" not in arguments and not {"-h", "--help"} & set(arguments):
        raise ConfigError(f"launch without a command; it comes last, after --: {EXAMPLE}")
    flags, command = _split(arguments)
    engine = _engine(flags)
    # One class with the flags of both, whose instances are options of both.
    both = dataclasses.make_dataclass(
        "Flags", [], bases=(LaunchOptions, engine.options), frozen=True
    )
    both.__doc__ = HELP
    options: Any = parse("launch", both, flags)  # exits where help is asked for
    if not command:
        raise ConfigError(f"nothing after --; the command comes there: {EXAMPLE}")
    if options.processes is None:
        raise ConfigError(f"launch without --processes; say how many: {EXAMPLE}")
    job = Job(
        command=tuple(command),
        processes=options.processes,
        devices_per_process=options.devices_per_process,
        pin=options.pin,
        restarts=options.restarts,
        name=options.name,
    )
    code, said = engine.run(job, options)
    return failed(said, code) if said else code


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What comes before the first `--`, and what comes after it."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _engine(flags: list[str]) -> Engine:
    """The engine that `flags` name, before they are parsed: it has flags of its own."""
    name = "local"
    for place, flag in enumerate(flags):
        if flag.startswith("--on="):
            name = flag.removeprefix("--on=")
        elif flag == "--on":
            name = flags[place + 1] if flags[place + 1 :] else ""
    if name not in ENGINES:
        raise ConfigError(
            f"--on {name!r}; a job is launched on one of {', '.join(ENGINES)}"
            f"{did_you_mean(name, ENGINES)}"
        )
    return ENGINES[name]()


def _local() -> Engine:
    return Engine(LocalOptions, _run_here)


def _run_here(job: Job, options: LocalOptions) -> tuple[int, str | None]:
    if options.grace < 0:
        raise ConfigError(f"--grace {options.grace:g}; it is in seconds, from 0: raise it")
    outcome = launch_here(job, logs=options.logs, grace_seconds=options.grace)
    return outcome.exit_code, outcome.message


def _slurm() -> Engine:
    from replicax.launch.scripts import SlurmOptions, slurm_script

    return Engine(SlurmOptions, lambda job, options: _print(slurm_script(job, options)))


def _kubernetes() -> Engine:
    from replicax.launch.scripts import KubernetesOptions, jobset_manifest

    return Engine(KubernetesOptions, lambda job, options: _print(jobset_manifest(job, options)))


def _ray() -> Engine:
    from replicax.launch.on_ray import RayOptions, launch_on_ray

    return Engine(RayOptions, launch_on_ray)


def _print(text: str) -> tuple[int, None]:
    print(text.rstrip("\n"))
    return 0, None


ENGINES: dict[str, Callable[[], Engine]] = {
    "local": _local,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "ray": _ray,
}
