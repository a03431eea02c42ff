"""A program on devices, attached or described -> what it takes."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.analysis.compiled import read_memory
from replicax.core.mesh import mesh_of
from replicax.plan.compilation import Compilation, Failed, TooLarge, too_large
from replicax.plan.program import Program
from replicax.wording import first_line


def answer(program: Program, devices: Sequence[Any]) -> Compilation | TooLarge | Failed:
    """Compile a program; whatever a compiler raises, who asked decides.

    Args:
        program: for as many devices.
        devices: attached ones, or those of a topology.
    """
    started = time.monotonic()
    try:
        compiled = _compile(program, devices)
    except Exception as error:
        seconds = time.monotonic() - started
        return too_large(str(error), seconds) or Failed(first_line(error))
    memory = read_memory(compiled)
    if memory is None:
        return Failed("the compiler does not tell what memory the step takes")
    return Compilation(memory, compiled.as_text() or "", time.monotonic() - started)


def _compile(program: Program, devices: Sequence[Any]) -> jax.stages.Compiled:
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
