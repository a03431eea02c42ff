"""Where a hook writes by default: in the folder of the run."""

from pathlib import Path

from replicax.errors import ConfigError
from replicax.train.hook import Running


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
