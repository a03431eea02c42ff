"""JAX's cache of compiled programs on disk, which `replicax train` and `verify` use by default."""

import hashlib
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from replicax.analysis.host import host_processor
from replicax.core.ground.jax_internals import open_cache_as
from replicax.text.cache_folder import cache_folder, make_private, prune, read_entry, write_entry
from replicax.text.wording import size_text

MOST_KEPT_BYTES = 10**9
"""Size to which the programs of one kind of device are pruned, least recently read first. JAX's own
limit, `jax_compilation_cache_max_size`, keeps no more once a process is killed while it writes."""


class _Programs:
    """Programs that JAX keeps in `folder`: machine code, so only those that this user wrote there.

    JAX's key is a digest of the program, its options, and the versions of the compiler.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder

    def get(self, key: str) -> bytes | None:
        """Return the program of a key; None if there is none that may be run."""
        return read_entry(self._path / f"{key}-cache")

    def put(self, key: str, value: bytes) -> None:
        write_entry(self._path / f"{key}-cache", value)


def keep_programs(device: jax.Device, *, prunes: bool) -> str | None:
    """Have JAX keep what it compiles, however fast, in the user's cache; return a line to print.

    Nothing happens if the user has configured JAX's cache. A CPU has a folder of its own for each
    set of features.

    Args:
        device: a device of the run.
        prunes: whether this process removes old programs.
    """
    config = jax.config
    enabled = config.jax_enable_compilation_cache
    chosen = config.jax_compilation_cache_dir is not None
    if chosen or not enabled:
        return None
    host = host_processor() if device.platform == "cpu" else ""
    kind = hashlib.sha256(host.encode()).hexdigest()[:8] if host else ""
    folder = cache_folder() / "programs" / f"{device.platform}{kind and f'-{kind}'}"
    is_new = not folder.exists()
    try:
        make_private(folder)
    except OSError as error:
        return f"compiled programs are not kept: {folder} cannot be used ({error.strerror})"
    if prunes:
        prune(folder.iterdir(), MOST_KEPT_BYTES)
    open_cache_as(str(folder), lambda: _Programs(folder))
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start has dozens
    compilation_cache.reset_cache()  # JAX looks for a folder once
    said = f"compiled programs are kept in {folder}, at most {size_text(MOST_KEPT_BYTES)}"
    return said if is_new else None
