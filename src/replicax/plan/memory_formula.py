"""The memory of a training step on one device, by arithmetic on what JAX traces.

Nothing is compiled, allocated or run. The state and the batch are counted array by array. For the
rest, the gradient of one micro-batch is traced, and its operations are followed in order; see
`replicax.plan.liveness`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.accumulate import Sequential
from replicax.core.batch import Batch, described, row_count
from replicax.core.data_parallel import DataParallel
from replicax.core.loss import LOSS
from replicax.core.mesh import STAGE, by_rows
from replicax.core.models.definition import PyTree, View
from replicax.core.objective import Objective
from replicax.core.partition import axes_of
from replicax.core.pipeline import SCHEDULES
from replicax.core.precision import to_sum
from replicax.core.update import TrainState
from replicax.plan.liveness import Liveness
from replicax.plan.operations import TracedOperations, array_bytes, for_platform


@dataclasses.dataclass(frozen=True)
class MemoryFormula:
    """Bytes on one device."""

    rows: int = 0
    """Rows of the batch on this device, padding included."""
    parameters: int = 0
    optimizer: int = 0
    extras: int = 0
    """The model's other arrays, the step, the seed and the reduction's state."""
    new_state: int = 0
    """The state after the step, where that before it stays: `donate=False`."""
    batch: int = 0
    """The rows, their mask and their index."""
    compute_copy: int = 0
    """The parameters in bfloat16, where the model computes in it and the backward pass reads them
    again."""
    gradient: int = 0
    """Sums over rows; over all micro-batches, where there are several."""
    activations: int = 0
    """Bytes that the forward pass of one micro-batch stores for the backward pass."""
    workspace: int = 0
    """All else that is stored when most is: logits and their gradient, say, or what is computed
    again for one layer."""
    never_together: int = 0
    """Part of the above that is not stored at that time: activations that are gone, and gradients
    that are not there yet."""

    @property
    def state(self) -> int:
        """Bytes in memory between steps."""
        return self.parameters + self.optimizer + self.extras

    @property
    def temporaries(self) -> int:
        """Bytes that a step takes beside the state and the batch."""
        stored = self.compute_copy + self.gradient + self.activations + self.workspace
        return stored - self.never_together

    @property
    def total(self) -> int:
        """Bytes that must be there for a step to run."""
        return self.state + self.new_state + self.batch + self.temporaries


def memory_formula(
    dp: DataParallel, model: Any, batch: Any, *, platform: str = "cpu"
) -> MemoryFormula:
    """The memory of `dp.step` on each device of its mesh, without compiling it.

    What it leaves out: copies that a compiler makes to change a layout or a dtype for a library,
    the scratch memory of libraries, and buffers of the network. A `lax.platform_dependent` counts
    as its branch for `platform` is traced here: a kernel that is chosen only where its GPU is
    attached (cuDNN's attention, say) counts as what stands in for it elsewhere.

    Args:
        dp: the step.
        model: as for `dp.init`; arrays or their shapes.
        batch: the global one, a pytree `[rows, ...]`; arrays or their shapes.
        platform: `cpu`, `cuda` or `tpu`.

    Raises:
        ConfigError: a layout that the mesh cannot hold.
        LossError: the loss does not keep its contract.
    """
    program = dp.program(model)
    state, split = program.shapes, program.split
    data = batch.data if isinstance(batch, Batch) else batch
    rows = split.padded(row_count(data)) // split.replicas
    share = jax.tree.map(on_one_device, state, program.shardings)
    parameters, optimizer = tree_bytes(share.params), tree_bytes(share.opt_state)
    extras = tree_bytes(share) - parameters - optimizer
    own_rows = tree_bytes(described(data, rows))
    part = described(data, rows // split.micro_batches)
    added_up = split.micro_batches > 1
    chosen = dp.configuration
    if chosen.step is None:
        used = jax.tree.map(_on_replica_device, state.params, program.shardings.params)
        objective = Objective(
            program.definition, chosen.loss, chosen.precision, program.objective.read
        )
        held = (share.params, used)
        memory = _of_gradient(objective, state, held, part, platform, added_up)
    else:
        memory = _of_own_step(program.own_step, state, part, platform)
    stages, parts, at_once = program.mesh.shape.get(STAGE, 1), dp.accumulate, 1
    if stages > 1:  # a pipeline keeps the activations of several micro-batches
        at_once = min(SCHEDULES[dp.layout.schedule](stages, parts) + stages, parts)
    return dataclasses.replace(
        memory,
        rows=rows,
        parameters=parameters,
        optimizer=optimizer,
        extras=extras,
        new_state=0 if dp.donate else parameters + optimizer + extras,
        batch=own_rows,
        activations=memory.activations * at_once // stages,
        # The rows of each micro-batch are put side by side first.
        workspace=memory.workspace + (own_rows if added_up else 0),
    )


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of `tree`, which may be shapes."""
    return sum(array_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _of_own_step(
    step: Callable[..., Any], state: TrainState, part: Batch, platform: str
) -> MemoryFormula:
    """The memory of a step of one's own on a micro-batch: the most that is stored at once.

    The next state is among it, as if it took no memory of the one before.
    """
    plain = partial(step, accumulator=Sequential(), reduce=lambda sums, carried, _: (sums, carried))
    closed = jax.make_jaxpr(lambda state, part: plain(state, part, None))(state, part)
    traced = TracedOperations(for_platform(closed.jaxpr, platform), platform)
    return MemoryFormula(workspace=Liveness(traced).peak().bytes)


def _of_gradient(
    objective: Objective,
    state: TrainState,
    parts: tuple[PyTree, PyTree],
    part: Batch,
    platform: str,
    added_up: bool,
) -> MemoryFormula:
    """The memory of the sums over one micro-batch, by shapes.

    `parts` are what one device holds of the parameters, and what it computes with, which rules for
    layers and stages may split. Where gradients are `added_up`, each is added to a running total as
    soon as it is there.
    """
    jaxpr, count = _traced(objective, state, part, platform)
    program = TracedOperations(jaxpr, platform)
    params = program.inputs[:count]
    gradient, saved = program.outputs[:count], program.outputs[count:]
    program.outputs = list(gradient)
    # Values that are a parameter in another dtype: that parameter by value.
    copies = {
        each.outputs[0]: each.inputs[0]
        for each in program.operations
        if each.name == "convert_element_type" and each.inputs and each.inputs[0] in params
    }
    held, used = (
        {
            value: array_bytes(own) / max(1, program.sizes[value])
            for value, own in zip(params, jax.tree.leaves(tree), strict=True)
        }
        for tree in parts
    )
    split = {value for value in params if held[value] < used[value]}
    split |= {copy for copy, own in copies.items() if own in split}
    kept = {
        value: int(program.sizes[value] * held[param])
        for value, param in (*copies.items(), *zip(gradient, params, strict=True))
    }
    sums = {value: kept[value] for value in gradient}
    if added_up:
        program.read_at_once(gradient)
    liveness = Liveness(program, kept, split)
    copied, owed, activations = {}, {} if added_up else sums, {}
    for value, size in liveness.alive_after(saved).items():
        if value in copies:
            copied[value] = size
        elif value not in owed:
            activations[value] = size
    most = liveness.peak()
    named = {**copied, **owed, **activations}
    missing = sum(size for value, size in named.items() if value not in most.alive)
    return MemoryFormula(
        compute_copy=sum(copied.values()),
        gradient=sum(kept[value] for value in (gradient if added_up else owed)),
        activations=sum(activations.values()),
        workspace=most.bytes - (sum(named.values()) - missing),
        never_together=missing,
    )


def _traced(
    objective: Objective, state: TrainState, part: Batch, platform: str
) -> tuple[Jaxpr, int]:
    """The gradient of a micro-batch's loss by each parameter, and how many parameters there are.

    After the gradients it returns the loss and what the backward pass reads of the forward pass.
    """
    leaves, tree = jax.tree.flatten(state.params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    rest, rest_tree = jax.tree.flatten((state.extras, part, key))

    def means(*arrays: jax.Array) -> list[jax.Array]:
        params = jax.tree.unflatten(tree, arrays[: len(leaves)])
        extras, batch, key = jax.tree.unflatten(rest_tree, arrays[len(leaves) :])
        found, extras = objective.loss_sums(params, extras, batch, View(key))
        return [found[LOSS].total, *jax.tree.leaves((found, extras))]

    closed = jax.make_jaxpr(means)(*leaves, *rest)
    chosen = jaxpr_as_fun(closed.replace(jaxpr=for_platform(closed.jaxpr, platform)))

    def gradient(params: list[jax.Array], rest: list[jax.Array]) -> Any:
        def total(*params: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            first, *others = chosen(*params, *rest)
            return first, others

        loss, backward, _ = jax.vjp(total, *params, has_aux=True)
        summed = [to_sum(each) for each in backward(jnp.ones_like(loss))]
        return summed, loss, jax.tree.leaves(backward)

    return jax.make_jaxpr(gradient)(leaves, rest).jaxpr, len(leaves)


def _on_replica_device(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Shape of a device's part of `leaf`, gathered over the axes that rows are split over."""
    mesh = sharding.mesh
    apart = axes_of(by_rows(mesh).spec)
    spec = (axes_of(PartitionSpec(entry)) for entry in sharding.spec)
    kept = (tuple(axis for axis in axes if axis not in apart) or None for axes in spec)
    return on_one_device(leaf, NamedSharding(mesh, PartitionSpec(*kept)))


def on_one_device(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Return the shape of what a device holds of an array."""
    return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)


@dataclasses.dataclass(frozen=True)
class OnPaper:
    """Figures of the formula for transformers; see `Transformer.on_paper`."""

    bytes_per_row: float
    """Bytes of activations."""
    rows: int
    """Rows of a device that fit beside its parameters."""


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The sizes that a formula often used on paper goes by."""

    tokens: int
    """Tokens of a row."""
    heads: int
    """Heads of each attention."""
    head_dim: int

    def on_paper(self, parameter_bytes: int, capacity_bytes: int) -> OnPaper:
        """M ≈ M_model · B T² / (4 N D²): the attention's scores, in proportion to its weights.

        The attention of a layer has four matrices (of queries, keys, values and the output) of
        (N D)² weights, and its N heads make N T² scores a row: N T² / (4 N² D²) of them for each
        weight. The formula takes that quotient for the whole model.

        It assumes T >> D, so that scores outweigh all else that is stored for the backward pass,
        that they are stored once (softmax and mask may store them more often, and FlashAttention,
        arXiv:2205.14135, never), and that a model is attention alone, without MLP and embedding. It
        leaves out the gradient of the parameters and the optimizer's state. `memory_formula`
        counts.
        """
        each = parameter_bytes * self.tokens**2 / (4 * self.heads * self.head_dim**2)
        return OnPaper(each, max(0, int((capacity_bytes - parameter_bytes) // each)))
