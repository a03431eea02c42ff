"""Whether the compiler of a platform is installed, whole, and the one that this jax wants."""

import importlib
import importlib.metadata
import re
import sys
from multiprocessing.connection import Connection
from typing import Any

import jax
from jax.experimental import topologies

from replicax.errors import CompilerError, ConfigError, MissingDependencyError, ReplicaxError
from replicax.plan.compilation import Description, answer
from replicax.plan.exported import ExportedStep
from replicax.wording import first_line

EXTRAS = {"tpu": "plan-tpu", "cuda": "plan-gpu"}
"""Extra of Replicax to install for a platform's compiler."""
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def check_installed(platform: str) -> None:
    """Raise where the compiler for `platform` is missing, or is not the one that jax names.

    Raises:
        MissingDependencyError: no package has it.
        ConfigError: jax asks for another version of the package.
    """
    if platform == "tpu":
        _check_libtpu()
    elif platform == "cuda":
        _check_cuda()


def compiler_name(platform: str) -> str:
    """The package that compiles for `platform`, with its version."""
    packages = {"tpu": ("libtpu",), "cuda": _PLUGINS}.get(platform, ("jaxlib",))
    found = [f"{package} {version}" for package in packages if (version := _version(package))]
    return found[0] if found else "jaxlib"


def check_libraries(platform: str) -> None:
    """Raise `MissingDependencyError` where a compiler that has been started lacks a library.

    Without cuDNN, XLA compiles for a GPU with other kernels, and other memory, than on one.
    """
    if platform != "cuda":
        return
    for plugin in _PLUGINS:
        if _version(plugin):
            versions = importlib.import_module(f"{plugin.replace('-', '_')}._versions")
            try:
                versions.cudnn_get_version()
            except Exception as error:
                raise _missing(f"{plugin} finds no cuDNN", platform) from error


def _check_libtpu() -> None:
    found, wanted = _version("libtpu"), _pinned_libtpu()
    if found is None:
        raise _missing("libtpu is not installed", "tpu")
    if wanted and not re.fullmatch(re.escape(wanted).replace(r"\*", ".*"), found):
        raise _another_version(
            f"libtpu {found} is installed, and jax {jax.__version__} wants {wanted}", "tpu"
        )


def _check_cuda() -> None:
    found = {plugin: version for plugin in _PLUGINS if (version := _version(plugin))}
    if not found:
        raise _missing(f"{_PLUGINS[0]} is not installed", "cuda")
    for plugin, version in found.items():
        if version != importlib.metadata.version("jaxlib"):
            raise _another_version(
                f"{plugin} {version} is installed, and jaxlib "
                f"{importlib.metadata.version('jaxlib')} wants its own version",
                "cuda",
            )


def _missing(text: str, platform: str) -> MissingDependencyError:
    return MissingDependencyError(f"{text}; pip install 'replicax[{EXTRAS[platform]}]'")


def _another_version(text: str, platform: str) -> ConfigError:
    install = f"pip install 'replicax[{EXTRAS[platform]}]'"
    return ConfigError(f"{text}; {install}, or plan by formula alone")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pinned_libtpu() -> str | None:
    """Version that jax's own extra `tpu` asks for: `0.0.42.*`, say."""
    lines = importlib.metadata.requires("jax") or []
    pins = (re.match(r"libtpu==([\w.*]+)", line) for line in lines)
    return next((pin[1] for pin in pins if pin), None)


def main(connection: Connection) -> None:
    """Answer until nobody asks any more."""
    description: Description = connection.recv()
    try:
        check_installed(description.platform)
        devices = _devices(description)
        check_libraries(description.platform)
    except ReplicaxError as refused:
        connection.send(refused)
        return
    except Exception as error:  # whatever a compiler raises, who asked decides
        text = f"no devices can be described for a compiler: {first_line(error)}"
        connection.send(CompilerError(text))
        return
    connection.send(compiler_name(description.platform))
    while True:
        try:
            program: ExportedStep = connection.recv()
        except EOFError:
            return
        connection.send(answer(program, devices))


def _devices(description: Description) -> list[Any]:
    if description.platform == "cpu":
        return list(jax.devices("cpu"))
    topology = topologies.get_topology_desc(platform=description.platform, **description.topology)
    if len(topology.devices) != description.devices:
        raise ValueError(
            f"the compiler describes {len(topology.devices)} devices, not {description.devices}"
        )
    return list(topology.devices)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
