"""Compile programs: what runs in a compiler's own process, and whether its package is installed."""

import dataclasses
import importlib
import importlib.metadata
import math
import re
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from replicax.analysis.compiled import Memory, read_memory
from replicax.core.mesh import mesh_of
from replicax.errors import CompilerError, ConfigError, MissingDependencyError, ReplicaxError
from replicax.plan.exported import ExportedStep
from replicax.wording import first_line

FAILS = "the compiler fails on this step"
_EXTRAS = {"tpu": "plan-tpu", "cuda": "plan-gpu"}
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
_TOTAL = re.compile(
    r"(?:Used|HLO temporaries \() ?([\d.]+)([KMGT]?)\)? (?:of|exceeds available HBM \() ?"
    r"([\d.]+)([KMGT]?)"
)


@dataclasses.dataclass(frozen=True)
class Description:
    """Devices to compile for."""

    platform: str
    devices: int
    topology: dict[str, Any]
    """Arguments of `jax.experimental.topologies.get_topology_desc`; none for host devices."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled step, read and let go."""

    memory: Memory
    """On one device."""
    text: str
    """The optimised module in XLA's language, in the order of its schedule."""
    seconds: float
    """Seconds that compiling took."""


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A step that the compiler refuses for the memory of its target."""

    needed_bytes: int | None
    """On one device, where the compiler says it. It may stop at the first sum that is too much, so
    the step can need more."""
    available_bytes: int | None


def too_large(message: str) -> TooLarge | None:
    """Return what a compiler's message says of memory; None if it is about something else."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    sizes = _TOTAL.search(message)
    if sizes is None:
        return TooLarge(None, None)
    return TooLarge(_bytes(sizes[1], sizes[2]), _bytes(sizes[3], sizes[4]))


def _bytes(number: str, prefix: str) -> int:
    """XLA's prefixes are powers of 1024."""
    return round(float(number) * 2.0 ** (10 * " KMGT".index(prefix or " ")))


def answer(program: ExportedStep, devices: Sequence[Any]) -> Compilation | TooLarge | CompilerError:
    """Compile a program for attached devices or described ones.

    Whatever a compiler raises is returned: who asked decides.
    """
    started = time.monotonic()
    try:
        compiled = _compile(program, devices)
    except Exception as error:
        return too_large(str(error)) or CompilerError(f"{FAILS}: {first_line(error)}")
    memory = read_memory(compiled)
    if memory is None:
        return CompilerError(f"{FAILS}: the compiler does not tell what memory the step takes")
    return Compilation(memory, compiled.as_text() or "", time.monotonic() - started)


def _compile(program: ExportedStep, devices: Sequence[Any]) -> jax.stages.Compiled:
    mesh = mesh_of(devices[: math.prod(program.sizes.values())], program.sizes)
    exported = jax.export.deserialize(bytearray(program.module))
    read = exported.module_kept_var_idx  # jit takes no argument that its function does not read

    def step(*arguments: jax.Array) -> Any:
        given = iter(arguments)
        return exported.call(
            *(
                next(given) if place in read else jnp.zeros(shape.shape, shape.dtype)
                for place, shape in enumerate(exported.in_avals)
            )
        )

    shardings = exported.in_shardings_jax(mesh)
    function = jax.jit(
        step,
        in_shardings=tuple(shardings[place] for place in read),
        out_shardings=exported.out_shardings_jax(mesh),
        donate_argnums=tuple(range(sum(place < program.donated for place in read))),
    )
    shapes = [exported.in_avals[place] for place in read]
    lowered = function.lower(*(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in shapes))
    return lowered.compile(dict(program.options))


def check_installed(platform: str) -> None:
    """Raise where the compiler for `platform` is missing, or is not the one that jax names.

    Raises:
        MissingDependencyError: no package has it.
        ConfigError: jax asks for another version of the package.
    """
    if platform not in _PACKAGES:
        return
    found = _installed(platform)
    if not found:
        raise _missing(f"{_PACKAGES[platform][0]} is not installed", platform)
    if platform == "tpu":  # jax's own extra asks for 0.0.42.*, say
        asked = importlib.metadata.requires("jax") or []
        pins = (re.match(r"libtpu==([\w.*]+)", each) for each in asked)
        wanted, who = next((pin[1] for pin in pins if pin), "*"), f"jax {jax.__version__}"
    else:
        wanted, who = importlib.metadata.version("jaxlib"), "jaxlib"
    for package, version in found.items():
        if not fnmatch(version, wanted):
            raise ConfigError(
                f"{package} {version} is installed, and {who} wants {wanted}; "
                f"{_install(platform)}, or plan by formula alone"
            )


def compiler_name(platform: str) -> str:
    """The package that compiles for `platform`, with its version."""
    return next((" ".join(each) for each in _installed(platform).items()), "jaxlib")


def _installed(platform: str) -> dict[str, str]:
    """Versions of the packages that compile for `platform`."""
    found = {}
    for package in _PACKAGES.get(platform, ("jaxlib",)):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _install(platform: str) -> str:
    return f"pip install 'replicax[{_EXTRAS[platform]}]'"


def _missing(text: str, platform: str) -> MissingDependencyError:
    return MissingDependencyError(f"{text}; {_install(platform)}")


def serve(descriptor: int) -> None:
    """Answer over a connection, the file of this number, until nobody asks any more."""
    connection = Connection(descriptor)
    description: Description = connection.recv()
    try:
        check_installed(description.platform)
        devices = _devices(description)
        if description.platform == "cuda":
            _check_cudnn()
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


def _check_cudnn() -> None:
    """Without cuDNN, XLA compiles for a GPU with other kernels, and other memory, than on one."""
    for plugin in _installed("cuda"):
        versions = importlib.import_module(f"{plugin.replace('-', '_')}._versions")
        try:
            versions.cudnn_get_version()
        except Exception as error:
            raise _missing(f"{plugin} finds no cuDNN", "cuda") from error
