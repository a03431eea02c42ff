"""Checks of a single process: compatible versions, and system limits."""

import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from replicax.cluster.accelerators import list_gpus
from replicax.known_wrong.known_table import release_numbers
from replicax.text.checks import FAIL, NOTE, PASS, Check

VERSIONS = "versions"
LIMITS = "limits"
LEAST_FILES = 1024
LEAST_SHARED_BYTES = 10**9
_SHOWN = ("replicax", "jax", "jaxlib", "numpy", "optax", "flax")
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)")
_MALLOC = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def check_versions() -> list[Check]:
    """Compare the versions of Python and relevant packages with those Replicax supports."""
    return judge_versions(platform.python_version(), installed(), requirements())


def installed() -> dict[str, str]:
    """Map each installed package that matters to its version."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.name or "").lower().replace("_", "-")
        if name in _SHOWN or _PLUGIN.fullmatch(name):
            versions.setdefault(name, distribution.version)  # the first on the path is imported
    return versions


def requirements() -> dict[str, str]:
    """Map each package to the versions that Replicax requires: `<0.12,>=0.10.2`."""
    ranges = {}
    for line in importlib.metadata.requires("replicax") or []:
        declared = re.fullmatch(r"([\w-]+)([<>=!~.,\d\s]+)(;.*)?", line)
        if declared and (not declared[3] or declared[1] in _SHOWN):
            ranges[declared[1]] = declared[2].strip()
    return ranges


def judge_versions(
    python: str, versions: Mapping[str, str], required: Mapping[str, str]
) -> list[Check]:
    """Return one row with all versions, and one per version outside its required range."""
    shown = {"python": python} | {name: versions[name] for name in _SHOWN if name in versions}
    shown |= {name: version for name, version in versions.items() if name not in shown}
    found = " · ".join(f"{name} {version}" for name, version in shown.items())
    rows = [Check(VERSIONS, "", PASS, found, figures={"versions": shown})]
    for name, supported in required.items():
        rows += _outside(name, versions[name], supported) if name in versions else []
    return rows + _unlike_jaxlib(versions)


def _outside(name: str, version: str, supported: str) -> list[Check]:
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", supported):
        below = release_numbers(version) < release_numbers(bound)
        if sign == ">=" and below:
            older = f"{name} {version} is older than {bound}, the oldest that Replicax supports"
            return [Check(VERSIONS, "", FAIL, older, f"pip install -U '{name}{supported}'")]
        if sign == "<" and not below:
            newer = f"{name} {version} is newer than any Replicax is tested with (<{bound})"
            return [Check(VERSIONS, "", NOTE, newer, f"pip install '{name}{supported}'")]
    return []


def _unlike_jaxlib(versions: Mapping[str, str]) -> list[Check]:
    """Check that JAX and jaxlib match, and that each plugin matches the jaxlib that loads it."""
    jax, jaxlib = versions.get("jax"), versions.get("jaxlib")
    if jax is None or jaxlib is None:
        return []
    rows = []
    if jax != jaxlib:
        text = f"jax {jax} with jaxlib {jaxlib}; they are released and tested together"
        fix = f"pip install 'jax=={jax}' 'jaxlib=={jax}'"
        rows.append(Check(VERSIONS, "", NOTE, text, fix))
    for name, version in versions.items():
        if _PLUGIN.fullmatch(name) and release_numbers(version) != release_numbers(jaxlib):
            text = f"{name} {version} with jaxlib {jaxlib}, which does not load it"
            rows.append(Check(VERSIONS, "", FAIL, text, f"pip install '{name}=={jaxlib}'"))
    return rows


def check_limits(env: Mapping[str, str]) -> list[Check]:
    """Check open files, shared memory, and glibc's settings."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/dev/shm")
    shared = os.statvfs(folder) if folder.is_dir() else None
    shared_bytes = shared.f_blocks * shared.f_frsize if shared else None
    return judge_limits(files, most, shared_bytes, bool(list_gpus()), env)


def judge_limits(
    files: int, most_files: int, shared_bytes: int | None, has_gpus: bool, env: Mapping[str, str]
) -> list[Check]:
    """Return one row with the limits, and one per limit that is too low.

    `files` is the soft and `most_files` the hard limit on open files; -1 means unlimited.
    `shared_bytes` is the size of /dev/shm, which GPU communication uses, or None.
    """
    unlimited = resource.RLIM_INFINITY
    parts = ["unlimited open files" if files == unlimited else f"{files:,} open files"]
    if shared_bytes is not None:
        parts.append(f"/dev/shm {shared_bytes / 1e9:,.1f} GB")
    tuned = [f"{name}={env[name]}" for name in _MALLOC if name in env]
    parts.append(f"malloc {', '.join(tuned) if tuned else 'defaults'}")
    note = "" if tuned else " (on CPUs, replicax train and bench tune it)"
    figures = {"open_files": files, "shared_bytes": shared_bytes, "malloc": tuned}
    rows = [Check(LIMITS, "", PASS, f"{' · '.join(parts)}{note}", figures=figures)]
    if files != unlimited and files < LEAST_FILES:
        highest = "" if most_files == unlimited else f"; {most_files:,} is the maximum allowed"
        text = f"{files:,} open files may be too few for data loaders and processes{highest}"
        rows.append(Check(LIMITS, "", NOTE, text, "run ulimit -n 65536 before starting"))
    if has_gpus and shared_bytes is not None and shared_bytes < LEAST_SHARED_BYTES:
        text = f"/dev/shm has {shared_bytes / 1e6:,.0f} MB; NCCL needs more between GPUs on a host"
        rows.append(Check(LIMITS, "", NOTE, text, "start the container with --shm-size=8g"))
    return rows
