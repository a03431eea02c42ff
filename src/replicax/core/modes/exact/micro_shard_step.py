"""Functions of a state and a batch that run the same programs on any number of devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import by_path, from_host
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.jaxpr import shapes_of
from replicax.core.modes.exact import micro_shard_primitives
from replicax.core.modes.exact.combining_programs import CollectivePrograms
from replicax.core.modes.exact.exchanged_parts import ExchangedPrograms
from replicax.core.modes.exact.host_executor import HostExecutor
from replicax.core.modes.exact.micro_shard_function import OnMicroShard
from replicax.core.modes.exact.own_draws import with_own_draws
from replicax.core.modes.exact.replica_program import ReplicaProgram
from replicax.core.modes.exact.sharded_update import MicroShard
from replicax.core.modes.step_builder import StepSpec
from replicax.core.placement.mesh import ShardDim, batch_shardings, sharding_of, split_dim
from replicax.core.step.base import CompiledFunction
from replicax.errors import LossError


class MicroShardStep:
    """Runs `function`, which `on_micro_shard` returns, on all micro-shards of a batch.

    `whole` is the same computation as one `jax.jit` function of the state and the whole batch; it
    is only analysed (computation, communication, memory), not run.
    """

    inline = None

    def __init__(
        self, parts: StepSpec, mesh: Mesh, function: OnMicroShard, whole: CompiledFunction[Any]
    ) -> None:
        self.trace, self.lower = whole.trace, whole.lower
        self._name, self._function, self._count = parts.name, function, parts.micro_shards
        self._mesh, self._donate, self._where = mesh, parts.donate, parts.state
        self._out, self._options = parts.out, parts.compiler_options or {}
        shares = parts.micro_shards // mesh.size
        self._collectives = CollectivePrograms(mesh, shares, parts.in_flight)
        if parts.exchange is not None:
            self._collectives = ExchangedPrograms(mesh, shares, parts.in_flight, parts.exchange)
        self._compiled: dict[Any, _Compiled] = {}

    def compiled(self, state: TrainState, batch: Batch) -> Sequence[ReplicaProgram]:
        """Return the compiled programs that compute it, in execution order."""
        return self._of(state, batch).parted.programs

    def text(self, state: TrainState, batch: Batch) -> str:
        return "\n".join(each.text for each in self.compiled(state, batch))

    def cache_size(self) -> int:
        return len(self._compiled)

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        return self._of(state, batch)(state, batch)

    def _of(self, state: TrainState, batch: Batch) -> "_Compiled":
        leaves, structure = jax.tree.flatten((state, batch))  # an optimizer may widen its state
        key = structure, *((np.shape(leaf), _dtype(leaf)) for leaf in leaves)
        if key not in self._compiled:
            shapes = [jax.ShapeDtypeStruct(*each) for each in key[1:]]
            self._compiled[key] = self._compile(*jax.tree.unflatten(structure, shapes))
        return self._compiled[key]

    def _compile(self, state: TrainState, batch: Batch) -> "_Compiled":
        """Trace the function on one micro-shard, and compile the segments of the trace."""
        count, number = self._count, jax.ShapeDtypeStruct((), np.int32)
        shardings = (self._where, jax.tree.broadcast(batch_shardings(self._mesh), batch))
        into = [split_dim(each) for each in jax.tree.leaves(shardings)]

        def traced(count: int) -> Any:
            shapes, structure = jax.tree.flatten(
                MicroShard(None, count).shapes((state, batch), into)
            )

            def run(number: jax.Array, *arrays: jax.Array) -> Any:
                state, batch = jax.tree.unflatten(structure, arrays)
                return self._function(state, batch, MicroShard(number, count))

            return jax.make_jaxpr(run, return_shape=True)(number, *shapes)

        closed, results = traced(count)
        if count > 1:
            split = [how is not None for how in [0, *into]]
            closed = with_own_draws(closed, split, lambda: traced(count // 2)[0])
        out = [split_dim(each) for each in jax.tree.leaves(jax.tree.broadcast(self._out, results))]
        of_state = len(jax.tree.leaves(state))
        donated = [False, *(self._donate and n < of_state for n in range(len(into)))]
        each_once = _each_once(_marked(closed, [0, *into], out))
        parted = HostExecutor(
            self._name, each_once, [0, *into], out, self._collectives, self._options, donated
        )
        for path, wanted, own in zip(by_path(results), out, parted.out, strict=True):
            if wanted is None and own is not None:
                raise LossError(
                    f"{path} depends on rows in the step itself, which differ between the {count} "
                    "micro-shards: take rx.mean of them, rx.value_and_grad of a loss of "
                    "them, or rx.gather them"
                )
        return _Compiled(parted, into, out, jax.tree.structure(results))


def _marked(closed: ClosedJaxpr, into: Sequence[ShardDim], out: Sequence[ShardDim]) -> ClosedJaxpr:
    """Mark results that are wanted of each micro-shard and are the same in all, as constants."""
    owned = micro_shard_primitives.owned_results(closed, [how is not None for how in into])
    alike = [how is not None and not own for how, own in zip(out, owned, strict=True)]
    if not any(alike):
        return closed

    def run(*arrays: jax.Array) -> list[jax.Array]:
        found = zip(jaxpr_as_fun(closed)(*arrays), alike, strict=True)
        return [micro_shard_primitives.own(leaf) if each else leaf for leaf, each in found]

    return jax.make_jaxpr(run)(*shapes_of(closed.jaxpr.invars))


def _each_once(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Copy results that are returned twice, since a later step may reuse their memory."""
    out = closed.jaxpr.outvars
    again = [isinstance(atom, Var) and atom in out[:n] for n, atom in enumerate(out)]
    if not any(again):
        return closed

    def run(*arrays: jax.Array) -> list[jax.Array]:
        found = zip(jaxpr_as_fun(closed)(*arrays), again, strict=True)
        return [jnp.copy(array) if each else array for array, each in found]

    return jax.make_jaxpr(run)(*shapes_of(closed.jaxpr.invars))


class _Compiled:
    """The programs for batches of one size, on arrays placed as in the layout."""

    def __init__(
        self,
        parted: HostExecutor,
        into: Sequence[ShardDim],
        out: Sequence[ShardDim],
        structure: Any,
    ) -> None:
        self.parted, self._structure, collectives = parted, structure, parted.collectives
        self._where = [sharding_of(collectives.mesh, own) for own in into]
        self._cut = collectives.cut(into)
        self._pieces = [n for n, own in enumerate(out) if own is not None]
        self._paste = collectives.pasted([own for own in out if own is not None])
        where, calls = sharding_of(collectives.mesh, 0), range(collectives.shares)
        self._numbers = [from_host(collectives.numbers(n), where) for n in calls]

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        leaves = zip(jax.tree.leaves((state, batch)), self._where, strict=True)
        values = self._cut([_placed(leaf, where) for leaf, where in leaves])
        found = self.parted([self._numbers, *values])
        if self._pieces:
            whole = self._paste([found[n] for n in self._pieces])
            for n, array in zip(self._pieces, whole, strict=True):
                found[n] = array
        return jax.tree.unflatten(self._structure, found)


def _dtype(leaf: Any) -> Any:
    """Return the dtype of a leaf on a device; a state may contain Python numbers."""
    return leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)


def _placed(leaf: Any, where: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array):
        lies = leaf.sharding
        if lies is where or lies.is_equivalent_to(where, leaf.ndim):
            return leaf
    placed: jax.Array = jax.device_put(leaf, where)
    return placed
