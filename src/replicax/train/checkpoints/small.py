"""Small arrays of a checkpoint, in one file if there are many.

    small.bin    {"params.b": 4, "params.c": 8}, a line break, then their bytes in that order

Orbax makes a folder for each array and syncs its files: a thousand scalars would take seconds.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_FILE = "small.bin"
_MOST_BYTES = 1024
_FEWEST = 256
"""Usual models have fewer, and remain readable by Orbax alone."""


def small(leaves: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays to keep in the file, the same in all processes."""
    found = sorted(
        name
        for name, leaf in leaves.items()
        if leaf.nbytes <= _MOST_BYTES and leaf.is_fully_replicated
    )
    if len(found) < _FEWEST:
        return []
    return found[len(found) == len(leaves) :]  # Orbax writes no checkpoint without an array


def write_small(folder: Path, values: Mapping[str, bytes]) -> None:
    """Write the file; it is on disk when this returns."""
    sizes = {name: len(value) for name, value in values.items()}
    with (folder / _FILE).open("wb") as file:
        file.write(msgspec.json.encode(sizes) + b"\n" + b"".join(values.values()))
        file.flush()
        os.fsync(file.fileno())


def read_small(folder: Path) -> dict[str, bytes]:
    """Return the contents of each array in the file; none without a file."""
    try:
        header, _, data = (folder / _FILE).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return {}
    found, start = {}, 0
    for name, size in msgspec.json.decode(header, type=dict[str, int]).items():
        found[name] = data[start : start + size]
        start += size
    return found
