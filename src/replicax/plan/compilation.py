"""A program -> what its compiler says, in whichever process."""

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.analysis.compiled import Memory, read_memory
from replicax.core.mesh import mesh_of
from replicax.errors import CompilerError
from replicax.plan.exported import ExportedStep
from replicax.wording import first_line

FAILS = "the compiler fails on this step"
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
    message: str
    """First line of the compiler's message."""
    seconds: float


def too_large(message: str, seconds: float) -> TooLarge | None:
    """Return what a compiler's message says of memory; None if it is about something else.

    Args:
        message: of the exception that compiling raised.
        seconds: that it took.
    """
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    sizes = _TOTAL.search(message)
    if sizes is None:
        return TooLarge(None, None, line, seconds)
    return TooLarge(_bytes(sizes[1], sizes[2]), _bytes(sizes[3], sizes[4]), line, seconds)


def _bytes(number: str, prefix: str) -> int:
    """XLA's prefixes are powers of 1024."""
    return round(float(number) * 2.0 ** (10 * " KMGT".index(prefix or " ")))


def answer(program: ExportedStep, devices: Sequence[Any]) -> Compilation | TooLarge | CompilerError:
    """Compile a program; whatever a compiler raises is returned: who asked decides.

    Args:
        program: for as many devices.
        devices: attached ones, or those of a topology.
    """
    started = time.monotonic()
    try:
        compiled = _compile(program, devices)
    except Exception as error:
        seconds = time.monotonic() - started
        return too_large(str(error), seconds) or CompilerError(f"{FAILS}: {first_line(error)}")
    memory = read_memory(compiled)
    if memory is None:
        return CompilerError(f"{FAILS}: the compiler does not tell what memory the step takes")
    return Compilation(memory, compiled.as_text() or "", time.monotonic() - started)


def _compile(program: ExportedStep, devices: Sequence[Any]) -> jax.stages.Compiled:
    mesh = mesh_of(devices[: program.devices], program.sizes)
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
