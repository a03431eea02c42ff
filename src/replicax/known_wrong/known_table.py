"""A row of `versions.toml`, and which rows concern a set of versions."""

import dataclasses
import functools
import importlib.metadata
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

RowAnswer = Literal["avoid", "say", "refuse", "list"]
CompilerOptions = Mapping[str, Any]

_TABLE = Path(__file__).with_name("versions.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KnownWrong:
    """Versions of a package that compute wrong numbers; the fields are described in the table."""

    name: str
    package: str
    first: str
    """The first version that is wrong; empty if none before was right."""
    fixed: str
    """The first one that is right again; empty if none is."""
    platform: str
    answer: RowAnswer
    wrong: str
    link: str
    fix: str
    device: str = ""
    flags: str = ""
    options: CompilerOptions = dataclasses.field(default_factory=dict)
    self_test: str = ""

    def holds(self, version: str) -> bool:
        """Whether `version` is in the range."""
        own = release_numbers(version)
        later = not self.fixed or own < release_numbers(self.fixed)
        return later and (not self.first or own >= release_numbers(self.first))

    @property
    def versions(self) -> str:
        """The range as text: `0.10.2 to before 0.12`."""
        if not self.fixed:
            return f"{self.first} and newer" if self.first else "all"
        return f"{self.first} to before {self.fixed}" if self.first else f"before {self.fixed}"


@functools.cache
def known_table() -> tuple[KnownWrong, ...]:
    """Return all rows."""
    with _TABLE.open("rb") as file:
        return tuple(KnownWrong(**row) for row in tomllib.load(file)["known"])


def concerning(
    versions: Mapping[str, str], platform: str, kinds: Sequence[str] = ("",), flags: str = ""
) -> list[KnownWrong]:
    """Return the rows that concern these versions of packages, on devices of these kinds.

    Args:
        versions: the version of each package that is installed.
        platform: of the devices: "cpu", "gpu" or "tpu".
        kinds: the kinds of the devices, as JAX names them.
        flags: the value of XLA_FLAGS.
    """
    return [
        row
        for row in known_table()
        if row.platform == platform
        and row.package in versions
        and row.holds(versions[row.package])
        and any(row.device in kind for kind in kinds)
        and re.search(row.flags, flags)
    ]


@functools.cache
def rows_here(platform: str) -> tuple[KnownWrong, ...]:
    """Return the rows that concern the attached devices of `platform`; none if there are none."""
    try:
        kinds = [device.device_kind for device in jax.local_devices(backend=platform)]
    except RuntimeError:  # described devices
        return ()
    found = concerning(installed_versions(), platform, kinds, os.environ.get("XLA_FLAGS", ""))
    return tuple(found)


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages of the table, as far as they are installed."""
    found = {}
    for package in dict.fromkeys(row.package for row in known_table()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: `(0, 10, 2)` for `0.10.2.post1`."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
