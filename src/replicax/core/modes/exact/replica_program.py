"""One compiled program for every device: the same instructions for any number of devices.

XLA compiles programs for several partitions with other passes than those for one, and rounds fused
operations differently. Programs with arithmetic are therefore compiled for a single partition, with
the shapes of one device, and every device of a mesh runs the program as a replica.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.sharding import Mesh

from replicax.core.ground import jax_internals  # JAX has no public way to run a program as replicas
from replicax.core.modes.exact.tuning import unrecorded_refused
from replicax.core.placement.mesh import ShardDim, platform_of, sharding_of
from replicax.errors import ConfigError

_OPTIONS: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_deterministic_ops": True}}
"""Compiler options by platform, before those given: no sums in an order of thread timing."""

_NOT_THE_PROGRAM = re.compile(r", metadata=\{[^}]*\}|, replica_count=\d+|^HloModule [^,]*", re.M)

_NOT_REPRODUCIBLE = {"dew_flash3_mha_bwd"}
"""Targets of calls of other packages' kernels that have no deterministic form."""


def as_global(array: jax.Array) -> jax.Array:
    """Return a split result of `ReplicaProgram` as an array that can be read as a whole.

    Since jax 0.12 the host reads all devices at once, by the shape of the program's result, which
    is that of one device.
    """
    parts = [part.data for part in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def with_deterministic_attention(module: ir.Module) -> ir.Module:
    """Make every backward pass of cuDNN's attention in `module` deterministic, and return it.

    `xla_gpu_deterministic_ops` does this to the first of several equal calls only, whose kernel the
    others then do not find: XLA ends with an IndexError (jaxlib 0.11.2).

    Raises:
        ConfigError: it calls a kernel that has no deterministic form.
    """
    refused: list[str] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        attributes = operation.attributes
        called = str(attributes["call_target_name"]) if "call_target_name" in attributes else ""
        if called.strip('"') in _NOT_REPRODUCIBLE:
            refused.append(called.strip('"'))
        if re.search(r"__cudnn\$fmha\w*Backward", called):
            config = json.loads(ir.StringAttr(attributes["backend_config"]).value)
            config["cudnn_fmha_backend_config"]["force_deterministic"] = True
            attributes["backend_config"] = ir.StringAttr.get(json.dumps(config), module.context)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if refused:  # not raised in the walk, which would make a RuntimeError of it
        raise ConfigError(
            f"mode='exact' with a call of {refused[0]}, which sums in the order of threads and has "
            "no option against it: use another kernel (attention='cudnn'), or another mode"
        )
    return module


class ReplicaProgram:
    """A jaxpr for one device's arrays, compiled for one device and run on all as replicas.

    It has no constants; arguments are laid out as in `into`, and results as in `out`. Results reuse
    the memory of `donated` arguments. The `name` appears in profiles and bitwise comparisons. It is
    compiled with `options` of XLA in the background, beside other programs, and waited for where it
    is first used.
    """

    def __init__(
        self,
        name: str,
        jaxpr: Jaxpr,
        mesh: Mesh,
        into: Sequence[ShardDim],
        out: Sequence[ShardDim],
        options: Mapping[str, Any],
        donated: Sequence[int] = (),
    ) -> None:
        self.name, self._mesh = name, mesh
        self._options = {**_OPTIONS.get(platform_of(mesh), {}), **options}
        run = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
        avals: list[Any] = [var.aval for var in jaxpr.invars]
        shapes = [
            jax.ShapeDtypeStruct(aval.shape or (1,) * (own is not None), aval.dtype)
            for aval, own in zip(avals, into, strict=True)
        ]

        def local(*arrays: jax.Array) -> list[jax.Array]:
            inside = [a.reshape(aval.shape) for a, aval in zip(arrays, avals, strict=True)]
            found = zip(run(*inside), out, strict=True)
            return [leaf if own is None or leaf.ndim else leaf.reshape(1) for leaf, own in found]

        local.__name__ = re.sub(r"\W", "_", name)
        lowered = jax.jit(local, donate_argnums=tuple(donated), keep_unused=True).lower(*shapes)
        self._lowered = lowered
        module = with_deterministic_attention(lowered._lowering.stablehlo())
        pool = ThreadPoolExecutor(1)
        self._compiling: Future[Any] = pool.submit(
            self._compiled, lowered, module, shapes, into, out
        )
        pool.shutdown(wait=False)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Run it on global arrays laid out as in `into`; `as_global` reads a split result."""
        return self._call(*arrays)

    @cached_property
    def _executable(self) -> Any:
        with unrecorded_refused(self.name):
            return self._compiling.result()

    @cached_property
    def _call(self) -> Callable[..., list[jax.Array]]:
        lowered = self._lowered
        call: Callable[..., list[jax.Array]] = jax_internals.Compiled(
            self._executable, lowered._lowering.const_args, lowered.args_info, lowered.out_tree
        )
        return call

    @property
    def text(self) -> str:
        """The program before optimization."""
        text: str = self._lowered.as_text()
        return text

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the optimized program, excluding names and the number of devices."""
        [module] = self._executable.xla_executable.hlo_modules()
        options = jax_internals.hlo.HloPrintOptions.short_parsable()
        options.print_metadata = False
        # XLA's numbers in names differ between compilations.
        options.canonicalize_instruction_names = options.canonicalize_computations = True
        text = _NOT_THE_PROGRAM.sub("", module.to_string(options))
        return hashlib.sha256(text.encode()).hexdigest()

    def as_text(self) -> str:
        """Return the optimized program."""
        [module] = self._executable.xla_executable.hlo_modules()
        text: str = module.to_string()
        return text

    def memory_analysis(self) -> Any:
        """Return XLA's memory statistics for one device."""
        return self._executable.xla_executable.get_compiled_memory_stats()

    def _compiled(
        self,
        lowered: Any,
        module: ir.Module,
        shapes: Sequence[jax.ShapeDtypeStruct],
        into: Sequence[ShardDim],
        out: Sequence[ShardDim],
    ) -> Any:
        mesh, computation = self._mesh, lowered._lowering
        chosen, devices = computation.compile_args, np.asarray(mesh.devices).reshape(-1)
        options = jax_internals.get_compile_options(
            num_replicas=devices.size,
            num_partitions=1,
            device_assignment=devices.reshape(-1, 1),
            env_options_overrides=self._options,
            backend=chosen["backend"],
        )
        device_list = jax_internals.xla_client.DeviceList(tuple(devices))
        executable = jax_internals.compile_or_get_cached(
            chosen["backend"],
            module,
            devices,
            options,
            chosen["host_callbacks"],
            device_list,
        )
        count = devices.size
        results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in lowered.out_info]
        avals = [
            [
                jax.core.ShapedArray(
                    tuple(n * count if dim == own else n for dim, n in enumerate(leaf.shape)),
                    leaf.dtype,
                )
                for leaf, own in zip(leaves, shard_dims, strict=True)
            ]
            for leaves, shard_dims in ((shapes, into), (results, out))
        ]
        places = [[sharding_of(mesh, own) for own in shard_dims] for shard_dims in (into, out)]
        loaded = jax_internals.UnloadedMeshExecutable(
            xla_executable=executable,
            device_list=device_list,
            backend=chosen["backend"],
            input_avals=avals[0],
            input_shardings=places[0],
            output_avals=avals[1],
            output_shardings=places[1],
            committed=True,
            name=self.name,
            unordered_effects=chosen["unordered_effects"],
            ordered_effects=chosen["ordered_effects"],
            keepalive=chosen["keepalive"],
            host_callbacks=chosen["host_callbacks"],
            kept_var_idx=chosen["kept_var_idx"],
            mut=None,
            xla_in_layouts=[None] * len(into),
            dispatch_in_layouts=[None] * len(into),
            xla_out_layouts=[None] * len(out),
            all_args_info=None,
            pgle_profiler=None,
        )
        return loaded.load()
