"""Mode `exact`: the same bits on any number of devices.

The mode builds the step itself, of programs that are the same on any number of devices, and hands
in a sum and a reduction with a fixed order. The files outside of this room only hand on
the argument `micro_shards`, and ask `Mode.bitwise`.
"""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from replicax.core.modes.exact.ordered_reduction import reduce_in_order
from replicax.core.modes.mapping import Mode, shard_map
from replicax.core.modes.step_builder import StepSpec, jitted, mapped
from replicax.core.placement.mesh import AnyMesh, options_on, replica_count
from replicax.core.step.base import Accumulator, CompiledFunction
from replicax.core.step.reduction import REDUCTIONS, Reduction, Wire
from replicax.errors import ConfigError

MICRO_SHARDS = 8
"""Default number of micro-shards."""


def fixed_tree(
    accumulate: int, micro_shards: int, mesh: AnyMesh, reduction: Reduction
) -> Accumulator:
    """Return the accumulator of mode `exact`."""
    if not isinstance(reduction, Wire):
        plain = [name for name, each in REDUCTIONS.items() if isinstance(each, Wire)]
        raise ConfigError(
            f"mode='exact' with reduction={getattr(reduction, 'name', reduction)!r}; it sums in a "
            f"fixed order: use one of {', '.join(plain)}, or mode='shard_map'"
        )
    from replicax.core.modes.exact.fixed_tree import FixedTree, check_threads

    tree, replicas = FixedTree(micro_shards, reduction), replica_count(mesh)
    own = tree.micro_batches(replicas)
    if own < accumulate:
        raise ConfigError(
            f"mode='exact' with accumulate={accumulate} on {replicas} replicas and "
            f"micro_shards={micro_shards}; each replica has {own} of them: increase micro_shards "
            f"to {accumulate * replicas}"
        )
    if isinstance(mesh, Mesh):
        check_threads(mesh, micro_shards)
    return tree


def _build(parts: StepSpec) -> CompiledFunction[Any]:
    """Return the program of `parts`, as the micro-shards of attached devices compute it."""
    # Imported here for short imports, as in other rooms: a third of the room, for this mode alone.
    from replicax.core.modes.exact.micro_shard_function import on_micro_shard
    from replicax.core.modes.exact.micro_shard_step import MicroShardStep

    # Options may be for the products of micro-shards, such as their recorded kernels.
    analysed = dataclasses.replace(parts, compiler_options=options_on(parts.mesh))
    whole, function = jitted(analysed, mapped(analysed)), on_micro_shard(parts)
    if not isinstance(parts.mesh, Mesh):
        return whole
    return MicroShardStep(parts, parts.mesh, function, whole)


EXACT = Mode(
    "exact",
    shard_map,
    per_replica=True,
    splits_optimizer=True,
    accumulator=fixed_tree,
    reduce=reduce_in_order,
    build=_build,
    bitwise=True,
    analysed="as one program, which does not run: micro-shards have programs of their own",
)
