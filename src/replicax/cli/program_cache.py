"""JAX's cache of compiled programs on disk, which `replicax train` uses by default."""

import contextlib
import hashlib
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from replicax.recipes.datasets import user_cache
from replicax.wording import size_text

MOST_KEPT_BYTES = 10**9
"""Size to which the programs of one kind of device are pruned, least recently read first. JAX's own
limit, `jax_compilation_cache_max_size`, keeps no more once a process is killed while it writes."""
# There XLA takes preferences of its compiler for features that the processor lacks, and prints an
# error for each program that it loads (jaxlib 0.10).
_REFUSED = "GenuineIntel"


def keep_programs(device: jax.Device, *, prunes: bool) -> str | None:
    """Have JAX keep what it compiles, however fast, in the user's cache; return a line to print.

    Nothing happens if the user has configured JAX's cache, or on a CPU that loads programs badly. A
    CPU has a folder of its own for each set of features.

    Args:
        device: a device of the run.
        prunes: whether this process removes old programs.
    """
    config = jax.config
    enabled = config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    chosen = config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
    processor = _processor() if device.platform == "cpu" else ""
    if chosen or not enabled or _REFUSED in processor:
        return None
    kind = hashlib.sha256(processor.encode()).hexdigest()[:8] if processor else ""
    folder = user_cache() / "programs" / f"{device.platform}{kind and f'-{kind}'}"
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"compiled programs are not kept: {folder} cannot be made ({error.strerror})"
    if prunes:
        prune(folder)
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start has dozens
    compilation_cache.reset_cache()  # JAX looks for a folder once
    said = f"compiled programs are kept in {folder}, at most {size_text(MOST_KEPT_BYTES)}"
    return said if is_new else None


def prune(folder: Path, most_bytes: int = MOST_KEPT_BYTES) -> None:
    """Remove the programs that were read or written first, down to `most_bytes`."""
    with contextlib.suppress(OSError):  # another process prunes, too
        entries = [(path, path.stat()) for path in folder.glob("*-cache")]
        total = sum(about.st_size for _, about in entries)
        for path, about in sorted(
            entries, key=lambda each: max(each[1].st_atime, each[1].st_mtime)
        ):
            if total <= most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= about.st_size


def _processor() -> str:
    """Return the model and the features of this machine's CPU, as far as they are known."""
    text = platform.machine()
    with contextlib.suppress(OSError):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = ("vendor_id", "model name", "flags", "Features", "CPU part")
        text += "".join(sorted({line for line in lines if line.startswith(known)}))
    return text
