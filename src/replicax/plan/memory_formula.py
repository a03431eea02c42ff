"""Estimate the memory of a training step on one device from its trace.

Nothing is compiled, allocated or run. The state and the batch are counted array by array. For the
rest, the gradient of one micro-batch is traced and its operations are analyzed in order; see
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

from replicax.core.data.batch import Batch
from replicax.core.data.per_row import RowsOfState, map_rows_of_state, resized
from replicax.core.data.rows import opened
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import to_sum
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.placement.mesh import STAGE, by_rows
from replicax.core.placement.pipeline_schedules import SCHEDULES
from replicax.core.placement.sharding_rules import axes_of
from replicax.core.step.accumulate import Sequential
from replicax.core.step.loss import LOSS
from replicax.core.step.objective import Objective
from replicax.plan.liveness import Liveness
from replicax.plan.operations import TracedOperations, array_bytes, for_platform


@dataclasses.dataclass(frozen=True)
class MemoryFormula:
    """Estimated bytes on one device."""

    rows: int = 0
    """Rows of the batch on this device, including padding."""
    parameters: int = 0
    optimizer: int = 0
    extras: int = 0
    """The model's other arrays, the step, the seed and the reduction's state."""
    new_state: int = 0
    """The state after the step, if the previous state is not donated (`donate=False`)."""
    batch: int = 0
    """The rows, their mask and their index."""
    compute_copy: int = 0
    """The parameters in bfloat16, if the model computes in it and the backward pass reads them."""
    gradient: int = 0
    """Gradient sums; accumulated over all micro-batches if there are several."""
    activations: int = 0
    """Bytes that the forward pass of one micro-batch stores for the backward pass."""
    workspace: int = 0
    """All other arrays at peak memory, such as logits and their gradient, or values recomputed for
    one layer."""
    never_together: int = 0
    """Part of the above that is not live at the peak: activations already freed, and gradients not
    yet computed."""

    @property
    def state(self) -> int:
        """Bytes in memory between steps."""
        return self.parameters + self.optimizer + self.extras

    @property
    def temporaries(self) -> int:
        """Bytes that a step needs in addition to the state and the batch."""
        stored = self.compute_copy + self.gradient + self.activations + self.workspace
        return stored - self.never_together

    @property
    def total(self) -> int:
        """Total bytes that a step needs."""
        return self.state + self.new_state + self.batch + self.temporaries


def memory_formula(
    dp: DataParallel,
    model: Any,
    batch: Any,
    *,
    platform: str = "cpu",
    known: dict[Any, Any] | None = None,
) -> MemoryFormula:
    """Estimate the memory of `dp.step` on each device of its mesh without compiling it.

    The estimate excludes copies that a compiler makes to change a layout or dtype for a library,
    library workspaces, and communication buffers. A `lax.platform_dependent` counts as its branch
    for `platform` traces here: a kernel that is selected only when its GPU is attached (such as
    cuDNN attention) counts as its fallback.

    Args:
        dp: the step.
        model: as for `dp.init`; arrays or their shapes.
        batch: the global batch, a pytree `[rows, ...]`; arrays or their shapes.
        platform: `cpu`, `cuda` or `tpu`.
        known: gradients of the same model and batch, of losses that are kept; layouts share them.

    Raises:
        ConfigError: the mesh does not support the layout.
        LossError: the loss violates its contract.
    """
    program = dp.program(model)
    state, split = program.shapes, program.split
    data = opened(batch.data if isinstance(batch, Batch) else batch)
    rows = split.padded(data.count) // split.replicas
    share = jax.tree.map(shard_of_device, state, program.shardings)
    parameters, optimizer = tree_bytes(share.params), tree_bytes(share.opt_state)
    extras = tree_bytes(share) - parameters - optimizer
    own_rows = tree_bytes(data.described(rows))
    part = data.described(rows // split.micro_batches)
    added_up = split.micro_batches > 1
    chosen = dp.configuration
    if chosen.step is None:
        used = jax.tree.map(_on_replica_device, state.params, program.shardings.params)
        objective = Objective(
            program.definition, chosen.loss, chosen.precision, program.objective.read
        )
        held = (share.params, used)
        known = {} if known is None else known
        key = id(chosen.loss), chosen.precision, objective.read, part.size
        if key not in known:
            known[key] = _traced(objective, state, part, platform)
        jaxpr, count = known[key]
        memory = _of_gradient(jaxpr, count, held, platform, added_up)
    else:
        of_part = map_rows_of_state(
            lambda held: RowsOfState(resized(held.value, part.size), part.size), state
        )
        memory = _of_custom_step(program.custom_step, of_part, part, platform)
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
        # The rows of each micro-batch are first copied to be contiguous.
        workspace=memory.workspace + (own_rows if added_up else 0),
    )


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all arrays, or shapes, in `tree`."""
    return sum(array_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _of_custom_step(
    step: Callable[..., Any], state: TrainState, part: Batch, platform: str
) -> MemoryFormula:
    """Return the peak memory of a custom step on a micro-batch.

    It includes the next state, as if the previous state were not donated.
    """
    plain = partial(
        step,
        accumulator=Sequential(),
        reduce=lambda sums, reduction_state, _: (sums, reduction_state),
    )
    closed = jax.make_jaxpr(lambda state, part: plain(state, part, None))(state, part)
    traced = TracedOperations(for_platform(closed.jaxpr, platform), platform)
    return MemoryFormula(workspace=Liveness(traced).peak().bytes)


def _of_gradient(
    jaxpr: Jaxpr, count: int, parts: tuple[PyTree, PyTree], platform: str, added_up: bool
) -> MemoryFormula:
    """Return the memory of the gradient sums of one micro-batch, as `_traced` returns them.

    `parts` are the parameter shards that one device stores, and those that it computes with, which
    rules for layers and stages may split. If gradients are `added_up`, each is added to the
    accumulator as soon as it is computed.
    """
    program = TracedOperations(jaxpr, platform)
    params = program.inputs[:count]
    gradient, saved = program.outputs[:count], program.outputs[count:]
    program.outputs = list(gradient)
    # Values that are a parameter cast to another dtype, mapped to that parameter.
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
    """Return the jaxpr of a micro-batch's gradient, and the number of parameters.

    The jaxpr returns the gradients, the loss, and the residuals that the backward pass reads.
    """
    leaves, tree = jax.tree.flatten(state.params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    rest, rest_tree = jax.tree.flatten((state.extras, part, key))

    def means(*arrays: jax.Array) -> list[jax.Array]:
        params = jax.tree.unflatten(tree, arrays[: len(leaves)])
        extras, batch, key = jax.tree.unflatten(rest_tree, arrays[len(leaves) :])
        found, extras = objective.loss_sums(params, extras, batch, CallContext(key))
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
    """Return the shape of a device's shard of `leaf`, gathered over the axes that split rows."""
    mesh = sharding.mesh
    apart = axes_of(by_rows(mesh).spec)
    spec = (axes_of(PartitionSpec(entry)) for entry in sharding.spec)
    kept = (tuple(axis for axis in axes if axis not in apart) or None for axes in spec)
    return shard_of_device(leaf, NamedSharding(mesh, PartitionSpec(*kept)))


def shard_of_device(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Return the shape of a device's shard of an array."""
    return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)


@dataclasses.dataclass(frozen=True)
class OnPaper:
    """Results of the formula for transformers; see `Transformer.on_paper`."""

    bytes_per_row: float
    """Bytes of activations."""
    rows: int
    """Rows per device that fit in addition to the parameters."""


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The sizes used by a common back-of-the-envelope formula."""

    tokens: int
    """Tokens per row."""
    heads: int
    """Attention heads per layer."""
    head_dim: int

    def on_paper(self, parameter_bytes: int, capacity_bytes: int) -> OnPaper:
        """M ≈ M_model · B T² / (4 N D²): attention scores in proportion to attention weights.

        The attention of a layer has four matrices (queries, keys, values and output) of (N D)²
        weights, and its N heads compute N T² scores per row: N T² / (4 N² D²) per weight. The
        formula applies that ratio to the whole model.

        It assumes that T >> D, so that scores dominate all other residuals; that scores are stored
        once (softmax and mask may store them several times, FlashAttention, arXiv:2205.14135,
        never); and that a model is attention only, without MLP and embedding. It excludes the
        gradient and the optimizer state. `memory_formula` counts all of these.
        """
        each = parameter_bytes * self.tokens**2 / (4 * self.heads * self.head_dim**2)
        return OnPaper(each, max(0, int((capacity_bytes - parameter_bytes) // each)))
