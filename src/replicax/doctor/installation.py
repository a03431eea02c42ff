"""Checks that a process makes by itself: versions that fit together, and limits of the system."""

import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from replicax.checks import FAIL, NOTE, PASS, Check
from replicax.cluster.accelerators import list_gpus

VERSIONS = "versions"
LIMITS = "limits"
LEAST_FILES = 1024
LEAST_SHARED_BYTES = 10**9
_SHOWN = ("replicax", "jax", "jaxlib", "numpy", "optax", "flax")
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)")
_MALLOC = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def check_versions() -> list[Check]:
    """The versions of Python and of the packages that matter, against what Replicax supports."""
    return judge_versions(platform.python_version(), installed(), requirements())


def installed() -> dict[str, str]:
    """Package -> version, of those that matter and are there."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.name or "").lower().replace("_", "-")
        if name in _SHOWN or _PLUGIN.fullmatch(name):
            versions.setdefault(name, distribution.version)  # the first on the path is imported
    return versions


def requirements() -> dict[str, str]:
    """Package -> the versions that Replicax declares to work with: `<0.12,>=0.10.2`."""
    ranges = {}
    for line in importlib.metadata.requires("replicax") or []:
        declared = re.fullmatch(r"([\w-]+)([<>=!~.,\d\s]+)(;.*)?", line)
        if declared and (not declared[3] or declared[1] in _SHOWN):
            ranges[declared[1]] = declared[2].strip()
    return ranges


def judge_versions(
    python: str, versions: Mapping[str, str], required: Mapping[str, str]
) -> list[Check]:
    """One row with all versions, and one for each that does not fit the range required of it."""
    shown = {"python": python} | {name: versions[name] for name in _SHOWN if name in versions}
    shown |= {name: version for name, version in versions.items() if name not in shown}
    found = " · ".join(f"{name} {version}" for name, version in shown.items())
    rows = [Check(VERSIONS, "", PASS, found, figures={"versions": shown})]
    for name, supported in required.items():
        rows += _outside(name, versions[name], supported) if name in versions else []
    return rows + _unlike_jaxlib(versions)


def _outside(name: str, version: str, supported: str) -> list[Check]:
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", supported):
        below = _numbers(version) < _numbers(bound)
        if sign == ">=" and below:
            older = f"{name} {version} is older than {bound}, the oldest that Replicax works with"
            return [Check(VERSIONS, "", FAIL, older, f"pip install -U '{name}{supported}'")]
        if sign == "<" and not below:
            newer = f"{name} {version} is newer than all that Replicax is tested with (<{bound})"
            return [Check(VERSIONS, "", NOTE, newer, f"pip install '{name}{supported}'")]
    return []


def _unlike_jaxlib(versions: Mapping[str, str]) -> list[Check]:
    """JAX and jaxlib are released together, and a plugin loads only into the jaxlib it is of."""
    jax, jaxlib = versions.get("jax"), versions.get("jaxlib")
    if jax is None or jaxlib is None:
        return []
    rows = []
    if jax != jaxlib:
        text = f"jax {jax} with jaxlib {jaxlib}; they are released, and tested, together"
        fix = f"pip install 'jax=={jax}' 'jaxlib=={jax}'"
        rows.append(Check(VERSIONS, "", NOTE, text, fix))
    for name, version in versions.items():
        if _PLUGIN.fullmatch(name) and _release(version) != _release(jaxlib):
            text = f"{name} {version} with jaxlib {jaxlib}, which does not load it"
            rows.append(Check(VERSIONS, "", FAIL, text, f"pip install '{name}=={jaxlib}'"))
    return rows


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", _release(version))))


def _release(version: str) -> str:
    """`0.10.2` of `0.10.2.post1` and of `0.10.2.dev20260101`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match[0] if match else version


def check_limits(env: Mapping[str, str]) -> list[Check]:
    """Open files, shared memory, and glibc's settings."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/dev/shm")
    shared = os.statvfs(folder) if folder.is_dir() else None
    shared_bytes = shared.f_blocks * shared.f_frsize if shared else None
    return judge_limits(files, most, shared_bytes, bool(list_gpus()), env)


def judge_limits(
    files: int, most_files: int, shared_bytes: int | None, has_gpus: bool, env: Mapping[str, str]
) -> list[Check]:
    """One row with the limits, and one for each that is too low.

    Of `files` -1 means any number, as of `most_files`, to which a process may raise that itself;
    `shared_bytes` is the size of /dev/shm, which the communication of GPUs takes, or None.
    """
    unlimited = resource.RLIM_INFINITY
    parts = ["any number of open files" if files == unlimited else f"{files:,} open files"]
    if shared_bytes is not None:
        parts.append(f"/dev/shm {shared_bytes / 1e9:,.1f} GB")
    tuned = [f"{name}={env[name]}" for name in _MALLOC if name in env]
    parts.append(f"malloc {', '.join(tuned) if tuned else 'as usual'}")
    note = "" if tuned else " (on CPUs, replicax train and bench tune it)"
    figures = {"open_files": files, "shared_bytes": shared_bytes, "malloc": tuned}
    rows = [Check(LIMITS, "", PASS, f"{' · '.join(parts)}{note}", figures=figures)]
    if files != unlimited and files < LEAST_FILES:
        highest = "" if most_files == unlimited else f"; {most_files:,} is the most allowed"
        text = f"{files:,} open files are few for data loaders and many processes{highest}"
        rows.append(Check(LIMITS, "", NOTE, text, "ulimit -n 65536 before the start"))
    if has_gpus and shared_bytes is not None and shared_bytes < LEAST_SHARED_BYTES:
        text = f"/dev/shm has {shared_bytes / 1e6:,.0f} MB; NCCL needs more between GPUs of a host"
        rows.append(Check(LIMITS, "", NOTE, text, "start the container with --shm-size=8g"))
    return rows
