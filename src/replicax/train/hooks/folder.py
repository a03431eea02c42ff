"""Where a hook writes by default: in the folder of the run."""

from pathlib import Path

from replicax.errors import ConfigError
from replicax.train.hook import Running
from replicax.train.places import is_remote, place


def in_folder(run: Running, name: str, hook: str) -> Path:
    """Return `name` in the run's folder, in process 0.

    Args:
        run: the run.
        name: of a file or a folder.
        hook: that writes it, for the message.

    Raises:
        ConfigError: the run has none.
    """
    if run.folder is None:
        raise ConfigError(
            f"{hook} and a run without a folder, where it writes {name}: give the run a run_dir"
        )
    return run.folder / name


def on_disk(run: Running, given: str | Path | None, name: str, hook: str) -> Path:
    """Return `given`, or `name` in the run's folder where that is None, in process 0.

    Raises:
        ConfigError: that is in an object store; or the run has no folder.
    """
    path = in_folder(run, name, hook) if given is None else place(given)
    if is_remote(path):
        raise ConfigError(
            f"{hook} writes to a file system and {path} is in an object store; give it a local "
            "path of its own"
        )
    return path
