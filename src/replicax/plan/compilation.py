"""Compile exported steps in a compiler's own process, and check that its package is installed."""

import dataclasses
import importlib
import importlib.metadata
import math
import re
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from replicax.analysis.compiled import Memory, read_memory
from replicax.core.placement.mesh import mesh_of, options_on, platform_of
from replicax.errors import (
    CompilerError,
    ConfigError,
    MissingDependencyError,
    ReplicaxError,
    install_command,
    require,
)
from replicax.plan.exported import FLASH3_CALLS, ExportedStep
from replicax.text.wording import first_line

FAILS = "the compiler fails on this step"
_EXTRAS = {"tpu": "plan-tpu", "cuda": "plan-gpu"}
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
_QUICK: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 0}}
"""Compiler options by platform that change only machine code, which nothing here runs."""
_UNTUNED: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
"""Compiler options for devices that are only described. Without a GPU to tune on, XLA gives each
product to Triton; tuning gave all of a step to cuBLAS, which leaves other arrays in memory."""
_TOTAL = re.compile(
    r"(?:Used|HLO temporaries \() ?([\d.]+)([KMGT]?)\)? (?:of|exceeds available HBM \() ?"
    r"([\d.]+)([KMGT]?)"
)


@dataclasses.dataclass(frozen=True)
class Description:
    """Description of the devices to compile for."""

    platform: str
    devices: int
    topology: dict[str, Any]
    """Arguments of `jax.experimental.topologies.get_topology_desc`; none for host devices."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Facts about a compiled step; the executable itself is released."""

    memory: Memory
    """Memory on one device."""
    text: str
    """The optimized HLO module, in schedule order."""
    seconds: float
    """Compile time."""


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A step that the compiler rejects because it exceeds the target's memory."""

    needed_bytes: int | None
    """Bytes on one device, if the compiler reports them. It may stop at the first total that is too
    large, so the step can need more."""
    available_bytes: int | None


class Compiler(Protocol):
    """A compiler of programs for some devices."""

    name: str
    """Package name and version."""

    @property
    def note(self) -> str:
        """Remark on its answers, for the plan; may be empty."""

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
        """Compile a program for these devices, or return that it is too large for them.

        Raises:
            CompilerError: the compiler fails.
        """


def too_large(message: str) -> TooLarge | None:
    """Parse an out-of-memory message of a compiler; return None for any other message."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    sizes = _TOTAL.search(message)
    if sizes is None:
        return TooLarge(None, None)
    return TooLarge(_bytes(sizes[1], sizes[2]), _bytes(sizes[3], sizes[4]))


def _bytes(number: str, prefix: str) -> int:
    """XLA's prefixes are powers of 1024."""
    return round(float(number) * 2.0 ** (10 * " KMGT".index(prefix or " ")))


def answer(
    program: ExportedStep, devices: Sequence[Any], *, tunes: bool
) -> Compilation | TooLarge | CompilerError:
    """Compile a program for devices, whose compiler `tunes` kernels on them if they are attached.

    Anything that the compiler raises is returned, for the caller to handle.
    """
    started = time.monotonic()
    try:
        compiled = _compile(program, devices, tunes)
    except Exception as error:
        return too_large(str(error)) or CompilerError(f"{FAILS}: {first_line(error)}")
    memory = read_memory(compiled)
    if memory is None:
        return CompilerError(f"{FAILS}: the compiler does not report the memory of the step")
    return Compilation(memory, compiled.as_text() or "", time.monotonic() - started)


def _compile(program: ExportedStep, devices: Sequence[Any], tunes: bool) -> jax.stages.Compiled:
    mesh = mesh_of(devices[: math.prod(program.sizes.values())], program.sizes)
    exported = jax.export.deserialize(bytearray(program.module))
    if any(name.encode() in exported.mlir_module_serialized for name in FLASH3_CALLS):
        require("dew_flash_attn", "flash3")._registered()  # XLA compiles no call that it cannot run
    read = exported.module_kept_var_idx  # jit drops arguments that its function does not read

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
    platform = platform_of(mesh)
    usual = {**_QUICK.get(platform, {}), **({} if tunes else _UNTUNED.get(platform, {}))}
    return lowered.compile({**usual, **options_on(mesh), **program.options})


def check_installed(platform: str) -> None:
    """Raise if the compiler for `platform` is missing or is not the version that jax requires.

    Raises:
        MissingDependencyError: no package provides it.
        ConfigError: jax requires another version of the package.
    """
    if platform not in _PACKAGES:
        return
    found = _installed(platform)
    if not found:
        raise _missing(f"{_PACKAGES[platform][0]} is not installed", platform)
    if platform == "tpu":  # jax's own extra pins it, for example to 0.0.42.*
        asked = importlib.metadata.requires("jax") or []
        pins = (re.match(r"libtpu==([\w.*]+)", each) for each in asked)
        wanted, who = next((pin[1] for pin in pins if pin), "*"), f"jax {jax.__version__}"
    else:
        wanted, who = importlib.metadata.version("jaxlib"), "jaxlib"
    for package, version in found.items():
        if not fnmatch(version, wanted):
            raise ConfigError(
                f"{package} {version} is installed, but {who} requires {wanted}; "
                f"{install_command(_EXTRAS[platform])}, or plan by formula only"
            )


def compiler_name(platform: str) -> str:
    """Return the package that compiles for `platform`, with its version."""
    return next((" ".join(each) for each in _installed(platform).items()), "jaxlib")


def _installed(platform: str) -> dict[str, str]:
    """Return the versions of the packages that compile for `platform`."""
    found = {}
    for package in _PACKAGES.get(platform, ("jaxlib",)):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _missing(text: str, platform: str) -> MissingDependencyError:
    return MissingDependencyError(f"{text}; {install_command(_EXTRAS[platform])}")


def serve(descriptor: int) -> None:
    """Answer requests over the connection with this file descriptor until it is closed."""
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
    except Exception as error:  # anything a compiler raises is left to the caller
        text = f"the compiler cannot describe the devices: {first_line(error)}"
        connection.send(CompilerError(text))
        return
    connection.send(compiler_name(description.platform))
    while True:
        try:
            program: ExportedStep = connection.recv()
        except EOFError:
            return
        connection.send(answer(program, devices, tunes=False))


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
    """Check for cuDNN, without which XLA picks kernels that a real GPU would not use."""
    for plugin in _installed("cuda"):
        versions = importlib.import_module(f"{plugin.replace('-', '_')}._versions")
        try:
            versions.cudnn_get_version()
        except Exception as error:
            raise _missing(f"{plugin} finds no cuDNN", "cuda") from error
