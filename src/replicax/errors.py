"""Errors that a user can cause and fix.

- ReplicaxError
  - ConfigError             a flag, an argument, or a combination of them
  - DataError               a file or a batch
  - LossError               what the loss function returned
  - DivergedError           a loss or a parameter that is no longer finite
  - StateError              a train state used twice or with the wrong DataParallel
  - ClusterError            processes that cannot find or join each other
  - IslandLeftError         an island that the others went on without
  - AgreementError          processes that differ where they must agree
    - ReplicasDifferError   replicas whose states are no longer equal
  - CheckpointError         a checkpoint that cannot be written, or fails verification
  - RunInUseError           a run that another process is already writing to
  - CompilerError           a compiler that fails on a step, or for a target
  - MissingDependencyError  an optional package that is not installed

Every message is one line: the numbers that disagree, the rule, and the fix.

`Terminated` and `interrupted` are no errors: they end a program whose run a signal has stopped.
"""

import difflib
import importlib.util
import json
import shlex
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from replicax.text.other_names import VALUES

__all__ = [
    "AgreementError",
    "CheckpointError",
    "ClusterError",
    "CompilerError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "IslandLeftError",
    "LossError",
    "MissingDependencyError",
    "ReplicasDifferError",
    "RunInUseError",
    "StateError",
]

T = TypeVar("T")


class ReplicaxError(Exception):
    """Base class of Replicax's errors. `exit_code` is the exit code of the CLI.

    Examples:
        >>> try:
        ...     rx.DataParallel(loss, optimizer, mode="fast")
        ... except rx.ReplicaxError as error:
        ...     print(type(error).__name__, error.exit_code)
        ConfigError 2
    """

    exit_code = 2


class ConfigError(ReplicaxError, ValueError):
    """An invalid flag or argument, or an invalid combination of them.

    Examples:
        >>> rx.DataParallel(loss, optimizer, accumulate=0)
        Traceback (most recent call last):
        replicax.errors.ConfigError: ...
    """


class DataError(ReplicaxError, ValueError):
    """An invalid data file or batch.

    Examples:
        >>> dp.feed({"x": np.zeros((3, 2)), "y": np.zeros(4)}, batch_size=2)
        Traceback (most recent call last):
        replicax.errors.DataError: ...
    """


class LossError(ReplicaxError, ValueError):
    """A loss function whose result violates the loss contract.

    Examples:
        >>> scalar = rx.DataParallel(lambda model, batch, key: "high", optimizer)
        >>> scalar.step(scalar.init(model), batch)
        Traceback (most recent call last):
        replicax.errors.LossError: ...
    """


class DivergedError(ReplicaxError, ArithmeticError):
    """A run whose loss, or parameters at the end, stopped being finite.

    Examples:
        >>> endless = {**source, "y": np.full_like(source["y"], np.inf)}
        >>> rx.fit(dp, state, endless, batch_size=32, epochs=3, guard=rx.Guard(max_bad_steps=2))
        Traceback (most recent call last):
        replicax.errors.DivergedError: ...
    """

    exit_code = 1


class StateError(ReplicaxError, RuntimeError):
    """A train state that was already consumed, or belongs to another model.

    Examples:
        >>> dp = rx.DataParallel(loss, optimizer)
        >>> state = dp.init(model)
        >>> after, _ = dp.step(state, batch)
        >>> dp.step(state, batch)  # its arrays were given to the step before
        Traceback (most recent call last):
        replicax.errors.StateError: ...
    """

    exit_code = 1


class ClusterError(ReplicaxError, RuntimeError):
    """A process that cannot find or join the other processes of its job."""

    exit_code = 1


class IslandLeftError(ReplicaxError, RuntimeError):
    """An island that is no longer a member of its group; started again, it joins.

    Examples:
        >>> try:
        ...     result = rx.fit(dp, state, source, batch_size=32, epochs=1)
        ... except rx.errors.IslandLeftError as error:
        ...     sys.exit(error.exit_code)
    """

    exit_code = 75
    is_sound = True
    """Whether the state that it had may be saved."""


class AgreementError(ReplicaxError, RuntimeError):
    """Processes that differ where they must agree: in code, configuration or data."""


class ReplicasDifferError(AgreementError):
    """Replicas whose states are no longer bitwise equal, most often due to a faulty device."""

    exit_code = 1


class CheckpointError(ReplicaxError, RuntimeError):
    """A checkpoint that cannot be written, or fails verification.

    Examples:
        >>> result = rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x")
        >>> for manifest in pathlib.Path("runs/x/checkpoints").rglob("*.json"):
        ...     written = manifest.write_text("{}")
        >>> rx.load("runs/x", dp=dp, state=dp.abstract_state(model))
        Traceback (most recent call last):
        replicax.errors.CheckpointError: ...
    """

    exit_code = 1


class RunInUseError(ReplicaxError, RuntimeError):
    """A run that another process is already writing to.

    Examples:
        >>> with rx.Run(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x"):
        ...     rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x")
        Traceback (most recent call last):
        replicax.errors.RunInUseError: ...
    """

    exit_code = 1


class CompilerError(ReplicaxError, RuntimeError):
    """A compiler failure on a step, or for the target of a plan."""

    exit_code = 1


class MissingDependencyError(ReplicaxError, ImportError):
    """An optional package that the call requires and that is not installed."""


class Terminated(SystemExit):
    """Raised in all processes by a run that SIGTERM, SIGHUP or SIGQUIT ended early.

    Everything is saved and closed; `result` is the run's `Fit`.
    """

    def __init__(self, result: Any) -> None:
        super().__init__(result.exit_code)
        self.result = result


def interrupted(result: Any) -> KeyboardInterrupt:
    """Return what a run that Ctrl-C ended early raises in all processes, after it is closed.

    `result` is the run's `Fit`, with the state after the last step. The class is no subclass: only
    `KeyboardInterrupt` itself ends a program as SIGINT does, and with it a loop in a shell.
    """
    saved = "everything is saved: the same call resumes" if result.saved else "nothing is saved"
    error = KeyboardInterrupt(f"stopped after step {result.step:,}; {saved}")
    error.result = result  # type: ignore[attr-defined]
    return error


def require(module: str, extra: str) -> ModuleType:
    """Import an optional `module`, or raise `MissingDependencyError` naming its `extra`, if any."""
    try:
        imported = importlib.import_module(module)
        if imported.__spec__ is not None and imported.__spec__.origin is None:
            # A folder of that name, as wandb creates, looks like a namespace package to Python.
            raise ModuleNotFoundError(name=module)
        return imported
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise missing(package, extra) from error


def check_found(module: str, extra: str) -> None:
    """Raise `MissingDependencyError` if an optional `module` is not found; it is not imported."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package that has it
        found = None
    if found is None:
        raise missing(module.partition(".")[0], extra)


def require_package(module: str, use: str) -> Any:
    """Import a `module` of a package that no extra has, or raise `MissingDependencyError`.

    `use` says what it does here, after "but": "reads file.pt".
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingDependencyError(
            f"{package} is not installed, but {use}; pip install {package}"
        ) from error


def missing(package: str, extra: str) -> MissingDependencyError:
    """Return the error that an optional `package` of `extra` is not installed."""
    command = install_command(extra) if extra else f"pip install {package}"
    return MissingDependencyError(f"{package} is not installed, but required; {command}")


def install_command(extra: str) -> str:
    """Return the command that adds `extra` to this Replicax, from where it was installed."""
    try:
        origin = json.loads(metadata.distribution("replicax").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # a clone on sys.path
        origin = {"url": Path(__file__).parents[2].as_uri(), "dir_info": {}}
    url = origin.get("url", "")
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"pip install 'replicax[{extra}]{f' @ {url}' if url else ''}'"


def choose(argument: str, name: Any, table: Mapping[str, T], otherwise: str = "") -> T:
    """Return the entry `name` of `table`.

    Args:
        argument: the argument as the user knows it, for the message.
        name: the given value.
        table: the valid names and their entries.
        otherwise: further valid values, for the message.

    Raises:
        ConfigError: `table` has no such name.
    """
    if isinstance(name, str) and name in table:
        return table[name]
    said = name if isinstance(name, str) else getattr(name, "__name__", str(name))
    nearest = did_you_mean(said, table)
    raise ConfigError(f"{argument}={name!r}; use one of {', '.join(table)}{otherwise}{nearest}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the closest known name as a suggestion for a message, or an empty string."""
    nearest = nearest_name(name, known)
    return f" (did you mean {nearest!r}?)" if nearest else ""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the closest known name, or that of the same value in other libraries."""
    known, small = list(known), name.lower()
    if VALUES.get(small) in known:
        return VALUES[small]
    either = (difflib.get_close_matches(each, known, n=1, cutoff=0.5) for each in (name, small))
    return next((close[0] for close in either if close), None)
