"""The modes by name.

A mode added to the table here, in its own file if needed, is available to every command.
"""

from typing import Literal

from replicax.core.modes.exact.exact_mode import EXACT
from replicax.core.modes.mapping import Mode as Mode
from replicax.core.modes.mapping import by_compiler, global_view, pmap, shard_map
from replicax.core.modes.per_replica_sums import build_where_rows_are_apart
from replicax.core.placement.layout import LAYOUTS
from replicax.errors import choose
from replicax.text.other_names import VALUES

ModeName = Literal["single", "jit", "shard_map", "pmap", "exact"]
"""The names of `MODES`, for type checkers and editors."""


def as_mode(mode: str | Mode) -> Mode:
    """Return the mode of that name, or raise `ConfigError`."""
    layout = VALUES.get(mode, mode) if isinstance(mode, str) else None
    otherwise = f"; that is a layout: write layout={layout!r}" if layout in LAYOUTS else ""
    return mode if isinstance(mode, Mode) else choose("mode", mode, MODES, otherwise)


MODES = {
    mode.name: mode
    for mode in (
        Mode("single", global_view, most_devices=1, reduce=by_compiler),
        Mode(
            "jit",
            global_view,
            splits_optimizer=True,
            splits_params=True,
            partitions=True,
            reduce=by_compiler,
            build=build_where_rows_are_apart,
        ),
        Mode("shard_map", shard_map, per_replica=True, splits_optimizer=True, splits_params=True),
        Mode("pmap", pmap, per_replica=True, most_processes=1, instead="shard_map"),
        EXACT,
    )
}
"""Modes by name: the reference, compiler partitioning, a per-replica view, the same with the
classic API, and bitwise identical results on any power of two of devices."""
