"""What is installed, and whether it fits together."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping

from replicax.doctor.row import OK, PROBLEM, WARNING, Row

CHECK = "versions"
_SHOWN = ("replicax", "jax", "jaxlib", "numpy", "optax", "flax")
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)")


def check_versions() -> list[Row]:
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
) -> list[Row]:
    """One row with all versions, and one for each that does not fit.

    Args:
        python: its version.
        versions: package -> version.
        required: package -> the range that is supported.
    """
    shown = {"python": python} | {name: versions[name] for name in _SHOWN if name in versions}
    shown |= {name: version for name, version in versions.items() if name not in shown}
    found = " · ".join(f"{name} {version}" for name, version in shown.items())
    misfits = [
        misfit
        for name, supported in required.items()
        if name in versions and (misfit := _outside(name, versions[name], supported))
    ]
    misfits += _unlike_jaxlib(versions)
    return [Row(CHECK, found, OK, figures={"versions": shown}), *misfits]


def _outside(name: str, version: str, supported: str) -> Row | None:
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", supported):
        below = _numbers(version) < _numbers(bound)
        if sign == ">=" and below:
            older = f"{name} {version} is older than {bound}, the oldest that Replicax works with"
            return Row(CHECK, older, PROBLEM, f"pip install -U '{name}{supported}'")
        if sign == "<" and not below:
            newer = f"{name} {version} is newer than all that Replicax is tested with (<{bound})"
            return Row(CHECK, newer, WARNING, f"pip install '{name}{supported}'")
    return None


def _unlike_jaxlib(versions: Mapping[str, str]) -> list[Row]:
    """JAX and jaxlib are released together, and a plugin loads only into the jaxlib it is of."""
    jax, jaxlib = versions.get("jax"), versions.get("jaxlib")
    if jax is None or jaxlib is None:
        return []
    rows = []
    if jax != jaxlib:
        text = f"jax {jax} with jaxlib {jaxlib}; they are released, and tested, together"
        rows.append(Row(CHECK, text, WARNING, f"pip install 'jax=={jax}' 'jaxlib=={jax}'"))
    for name, version in versions.items():
        if _PLUGIN.fullmatch(name) and _release(version) != _release(jaxlib):
            text = f"{name} {version} with jaxlib {jaxlib}, which does not load it"
            rows.append(Row(CHECK, text, PROBLEM, f"pip install '{name}=={jaxlib}'"))
    return rows


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", _release(version))))


def _release(version: str) -> str:
    """`0.10.2` of `0.10.2.post1` and of `0.10.2.dev20260101`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match[0] if match else version
