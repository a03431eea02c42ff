"""Placement of each array of a train state: predefined layouts and user rules."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.ground.leaves import from_host
from replicax.core.ground.train_state import Owned, TrainState
from replicax.core.placement.mesh import (
    DATA,
    FSDP,
    AnyMesh,
    Axis,
    by_rows,
    replicated,
    row_axis,
    shard_axis,
)
from replicax.core.placement.pipeline_schedules import SCHEDULES, ScheduleName
from replicax.core.placement.sharding_rules import Rules, axes_of, check_rules, spec_by_rule
from replicax.errors import ConfigError, choose
from replicax.text.arguments import answered
from replicax.text.wording import counted


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of the arrays of a train state: replicated, unless the layout shards them."""

    name: str
    splits_optimizer: bool = False
    """Whether the optimizer state is sharded over the replicas."""
    splits_params: bool = False
    """Whether parameters are too; each is all-gathered where the loss uses it."""
    rules: tuple[tuple[str, PartitionSpec], ...] = ()
    """Specs over the other axes: `model` shards each layer, `stage` stacks of layers."""
    schedule: ScheduleName = "1f1b"
    """Order of the micro-batches in pipeline stages, if any."""
    shards: int | None = None
    """Number of equal shards of each sharded array, over all replicas; None: one per device along
    one axis."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_whole(self) -> bool:
        """Whether each device holds the whole state."""
        return not (self.splits_optimizer or self.splits_params or self.rules)

    @property
    def axes(self) -> set[str]:
        """Names of the mesh axes over which its rules shard arrays."""
        return {axis for _, spec in self.rules for axis in axes_of(spec)}

    def shardings(self, state: TrainState, mesh: AnyMesh) -> TrainState:
        """Return the tree of `state`, arrays or shapes, with `NamedSharding`s as leaves.

        Raises `ConfigError` if the rules do not match the mesh or the parameters.
        """
        placed = self._placed(state.params, mesh)
        where: TrainState = jax.tree.map(lambda _: replicated(mesh), state)
        return dataclasses.replace(
            where,
            params=placed(state.params, self.splits_params),
            opt_state=placed(state.opt_state, self.splits_optimizer),
            reduction=jax.tree.map(lambda _: by_rows(mesh), state.reduction),
        )

    def gradient_shardings(self, params: Any, mesh: AnyMesh) -> Any:
        """Return the shardings of the reduced gradient: those of the optimizer state."""
        return self._placed(params, mesh)(params, self.splits_optimizer)

    def _placed(self, params: Any, mesh: AnyMesh) -> Callable[[Any, bool], Any]:
        ruled = spec_by_rule(params, mesh, self.rules)
        axis = shard_axis(mesh) if self.shards is None else row_axis(mesh)
        parts = self.shards or mesh.shape[axis]

        def placed(tree: Any, splits: bool) -> Any:
            def sharding(path: Any, leaf: Any) -> NamedSharding:
                shape = tuple(leaf.shape)
                spec = ruled(jax.tree_util.keystr(path), shape)
                if splits:
                    spec = _split_largest(shape, spec, axis, parts)
                return NamedSharding(mesh, spec)

            def whole_slots(path: Any, node: Any) -> Any:
                if not isinstance(node, Owned):
                    return sharding(path, node)
                if splits and node.owners % parts:
                    raise ConfigError(
                        f"the optimizer has {counted(node.owners, 'owner')} of matrices and "
                        f"layout={self.name!r} {parts} parts, of which each needs equally many: "
                        f"use a number of devices that divides {node.owners}, owners= a multiple "
                        f"of {parts}, or layout='replicated'"
                    )
                spec = PartitionSpec(axis) if splits else PartitionSpec()
                return jax.tree.map(lambda _: NamedSharding(mesh, spec), node)

            return jax.tree_util.tree_map_with_path(
                whole_slots, tree, is_leaf=lambda node: isinstance(node, Owned)
            )

        return placed


LayoutName = Literal["replicated", "zero1", "fsdp"]
"""The names of `LAYOUTS`, for type checkers and editors."""
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("replicated"),
        Layout("zero1", splits_optimizer=True),
        Layout("fsdp", splits_optimizer=True, splits_params=True),
    )
}


@answered
def layout(
    name: LayoutName = "replicated", *, rules: Rules = (), schedule: ScheduleName = "1f1b"
) -> Layout:
    """Return a layout over replicas with rules for the mesh's other axes.

    Examples:
        >>> rules = [("w1", P(None, "model")), ("w2", P("model")), ("", P())]
        >>> dp = DataParallel(
        ...     loss, optimizer, mesh=make_mesh(model=2), layout=layout("fsdp", rules=rules)
        ... )

    Args:
        name: `replicated`, `zero1` or `fsdp`: selects what is sharded over the replicas.
        rules: pairs of a regex, searched in the path of each parameter, and a `PartitionSpec`; the
            first match applies to the parameter and its optimizer state. `stage` in dim 0 splits
            layers that the loss scans over in one `jax.lax.scan` into pipeline stages.
        schedule: order of the micro-batches through the stages: `1f1b` or `gpipe`.

    Raises:
        ConfigError: an unknown layout or schedule, or an invalid rule.
    """
    base = choose("layout", name, LAYOUTS)
    choose("schedule", schedule, SCHEDULES)
    rules = check_rules(rules)
    called: str = name
    if rules:
        called = "rules" if base.is_whole else f"{name}+rules"
    return dataclasses.replace(base, name=called, rules=rules, schedule=schedule)


def as_layout(value: "str | Rules | Layout") -> Layout:
    """Return the layout for a name or rules, or raise `ConfigError`."""
    if isinstance(value, Layout):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return layout(rules=value)
    otherwise = ", a list of (path regex, PartitionSpec), or rx.layout(name, rules=rules)"
    return choose("layout", value, LAYOUTS, otherwise)


def check_axes(layout: Layout, mesh: AnyMesh) -> None:
    """Raise `ConfigError` if devices along an axis would all do the same computation."""
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in {DATA, FSDP, *layout.axes}:
            raise ConfigError(
                f"the mesh has {size} devices along {axis!r} and layout={layout.name!r} shards "
                f"nothing over it, so all would do the same computation: remove {axis}={size}, "
                f"or use layout rules that name {axis!r}"
            )


def _split_largest(
    shape: tuple[int, ...], spec: PartitionSpec, axis: Axis, parts: int
) -> PartitionSpec:
    """Return `spec` with the largest unsharded dim that `parts` divides, if any, over `axis`.

    The leading dim of three or more is the last choice: it may be one of stacked layers, which a
    scan can all-gather one at a time only if each layer is sharded.
    """
    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    if axis in axes_of(spec):
        return spec
    dims = [d for d, size in enumerate(shape) if size and not entries[d] and size % parts == 0]
    if not dims:
        return spec
    largest = max(dims, key=lambda dim: (dim > 0 or len(shape) < 3, shape[dim]))
    return PartitionSpec(*(axis if dim == largest else entries[dim] for dim in range(len(shape))))


def on_devices_of(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """Return `leaf`, moved if its devices differ from those of `sharding`."""
    if not sharding.is_fully_addressable and getattr(leaf, "is_fully_addressable", True):
        # device_put would compare the whole array across processes once more.
        return from_host(leaf, sharding)
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set != sharding.device_set:
        return jax.device_put(leaf, sharding)
    return leaf


def bytes_per_device(leaves: Iterable[Any]) -> int:
    """Return the bytes that each device has of arrays, or of shapes, with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )


@jax.jit
def copied(tree: Any) -> Any:
    """Return a copy of the arrays of `tree`, with the same placement."""
    return jax.tree.map(jnp.copy, tree)
