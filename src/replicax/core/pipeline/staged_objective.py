"""Pipeline stages: each device along the mesh axis `stage` holds some of the layers.

The loss is the user's, with one `lax.scan` over its layers. For each micro-batch the first stage
computes the part before the scan, each stage its layers, and the last stage the part after.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree, by_path, divided, merged
from replicax.core.ground.vectors import all_reduce
from replicax.core.models.definition import CallContext
from replicax.core.pipeline.split_at_scan import stage_parts
from replicax.core.pipeline.stage_ticks import Stage
from replicax.core.placement.mesh import STAGE, AnyMesh, replica_count, row_axis
from replicax.core.placement.sharding_rules import axes_of
from replicax.core.step.accumulate import folded, split_rows
from replicax.core.step.base import StepSums
from replicax.core.step.loss import sums
from replicax.core.step.objective import Objective, only_read
from replicax.errors import ConfigError, LossError

_WHOLE, _LAYERS = PartitionSpec(), PartitionSpec(STAGE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged(Objective):
    """An objective whose sums are computed in stages; `returned` uses all rows and layers."""

    mesh: AnyMesh
    shardings: PyTree
    """`NamedSharding`s of the parameters; those with `stage` in dim 0 are layer stacks."""
    micro_batches: int
    """Number of micro-batches that the rows of a replica are split into."""
    schedule: str = "1f1b"
    """See `replicax.core.placement.pipeline_schedules.SCHEDULES`."""
    per_replica: ClassVar[bool] = True

    def score_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext
    ) -> tuple[StepSums, PyTree]:
        """Return `Objective.score_sums` of all micro-batches, all-reduced."""

        def sums(stage: Stage) -> Any:
            return all_reduce(stage.forward_sums(), self._everyone)

        weighted = self._mapped(sums, _WHOLE, params, extras, batch, context)
        return StepSums((), weighted), extras

    def step_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext
    ) -> tuple[StepSums, PyTree]:
        """Return `Objective.step_sums` of all micro-batches, all-reduced."""

        def sums(stage: Stage) -> Any:
            return self._reduced(stage.step_sums(self.read, self.schedule))

        out: Any = StepSums(only_read(self._specs, self.read), _WHOLE)  # type: ignore[arg-type]
        return self._mapped(sums, out, params, extras, batch, context), extras

    def _reduced(self, sums: StepSums) -> StepSums:
        """All-reduce gradients of layers over replicas, and all other sums over stages too."""
        leaves, tree = jax.tree.flatten(sums.gradient)
        layers = [spec == _LAYERS for spec in jax.tree.leaves(only_read(self._specs, self.read))]
        own, shared = divided(leaves, layers)
        own = all_reduce(own, row_axis(self.mesh))
        shared, weighted = all_reduce((shared, sums.weighted), self._everyone)
        return StepSums(jax.tree.unflatten(tree, merged(own, shared, layers)), weighted)

    @property
    def _everyone(self) -> tuple[str, ...]:
        rows = row_axis(self.mesh)
        return (*([rows] if isinstance(rows, str) else rows), STAGE)

    @property
    def _specs(self) -> PyTree:
        """The specs of the parameters that a stage uses: its layers, and everything else whole."""
        return jax.tree.map(
            lambda sharding: _LAYERS if sharding.spec[:1] == _LAYERS[:1] else _WHOLE, self.shardings
        )

    def _mapped(
        self,
        function: Callable[[Stage], Any],
        out: Any,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        context: CallContext,
    ) -> Any:
        """Map `function` over the stages of all replicas; `out` holds the specs of its results."""
        mesh, batch = self.mesh, batch.apart()
        stages, rows = int(mesh.shape[STAGE]), PartitionSpec(row_axis(mesh))
        shapes = jax.eval_shape(
            lambda *given: given, params, extras, batch, context.key, context.step
        )

        def of_one(given: Any, replica: jax.Array, index: jax.Array) -> Any:
            # Trace whole layers here, as equations record the axes that are mapped around them.
            traced, structure = self._traced(*shapes)
            parts = stage_parts(traced, self._layers(shapes[0]), stages, structure.num_leaves)
            params, extras, batch, key, step, scale = given
            stage = Stage(
                *(parts, structure, stages, self.micro_batches, index[0], params, extras),
                rows=batch.map_rows(partial(split_rows, parts=self.micro_batches)),
                context=CallContext(folded(key, replica[0]), step=step, scale=scale),
            )
            return function(stage)

        # Indices are passed as arrays: if only some axes are mapped, not every backend has an
        # instruction that returns them.
        of_batch = Batch(rows, rows, rows, shared=_WHOLE, count=rows)  # type: ignore[arg-type]
        of_all = (self._specs, _WHOLE, of_batch, _WHOLE, _WHOLE, _WHOLE)
        mapped = jax.shard_map(
            of_one,
            mesh=mesh,
            in_specs=(of_all, rows, _LAYERS),
            out_specs=out,
            axis_names=set(self._everyone),
            check_vma=False,
        )
        given = (params, extras, batch, context.key, context.step, context.scale)
        return mapped(given, jnp.arange(replica_count(mesh)), jnp.arange(stages))

    def _layers(self, params: PyTree) -> dict[int, str]:
        """Return the indices of parameters that are stacks of layers, with their paths.

        `ConfigError` if there is none, or one is split over `stage` in another way.
        """
        paths = list(by_path(params))
        specs = [sharding.spec for sharding in jax.tree.leaves(self.shardings)]
        layers: dict[int, str] = {}
        for place, (path, spec) in enumerate(zip(paths, specs, strict=True)):
            if spec[:1] == _LAYERS[:1]:
                layers[place] = path
            elif STAGE in axes_of(spec):
                raise ConfigError(
                    f"the rule for {path} has the spec {spec}; the first dim, that of "
                    "layers, must be split over stages only: write PartitionSpec('stage', ...)"
                )
        if not layers:
            raise ConfigError(
                f"the rules split none of {len(paths)} parameters over {self.mesh.shape[STAGE]} "
                "stages, which split layers: place the rule of the layers, (regex, "
                "PartitionSpec('stage')), before others that match"
            )
        return layers

    def _traced(
        self, params: PyTree, extras: PyTree, batch: Batch, key: Any, step: Any
    ) -> tuple[ClosedJaxpr, Any]:
        """Trace the sums of one micro-batch; return their jaxpr and treedef.

        `LossError` if the model writes to its non-trainable arrays.
        """
        whole = batch.size
        size = whole // replica_count(self.mesh) // self.micro_batches
        one = batch.map_rows(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype))

        def of_one(params: PyTree, extras: PyTree, batch: Batch, key: Any, step: Any) -> Any:
            context = CallContext(key, part=batch.size < whole, step=step)
            counts = None if key is None else batch.counts

            def found(returned: Any) -> Any:
                return sums(returned, batch.mask, counts)

            return self._called(found, params, extras, batch, context)

        traced, (weighted, after) = jax.make_jaxpr(of_one, return_shape=True)(
            params, extras, one, key, step
        )
        structure: Any = jax.tree.structure(weighted)
        jaxpr = traced.jaxpr
        given, found = jaxpr.invars[len(jax.tree.leaves(params)) :], jaxpr.outvars
        for path, old, new in zip(
            by_path(after), given, found[structure.num_leaves :], strict=False
        ):
            if old is not new:
                raise LossError(
                    f"the model writes {path} on {self.mesh.shape[STAGE]} stages of "
                    f"{self.micro_batches} micro-batches; stages do not support this: use one "
                    "stage, or a layer without statistics, such as LayerNorm"
                )
        return traced, structure
