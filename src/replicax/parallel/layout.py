"""Abstract state + mesh + rule -> where each array lives."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.errors import ConfigError, did_you_mean
from replicax.parallel.mesh import DATA, replica_count
from replicax.parallel.update import TrainState

LAYOUTS = ("replicated", "zero1", "fsdp")

Rules = Sequence[tuple[str, PartitionSpec]]
Layout = str | Rules
"""A name of `LAYOUTS`, or rules: `(path regex, PartitionSpec)`, the first match deciding.

- replicated  every device holds everything
- zero1       the optimizer's state is split over the replicas
- fsdp        the parameters too
- rules       each parameter, and the optimizer's copies of it, as its rule says
"""

MODES_OF_LAYOUT = {
    "replicated": ("single", "jit", "shard_map", "pmap"),
    "zero1": ("jit",),
    "fsdp": ("jit",),
    "rules": ("jit",),
}


def layout_name(layout: Layout) -> str:
    """The layout's name; `"rules"` for a list of them.

    Raises:
        ConfigError: no such layout.
    """
    if not isinstance(layout, str):
        return "rules"
    if layout not in LAYOUTS:
        raise ConfigError(
            f"layout={layout!r}; it is one of {', '.join(LAYOUTS)}, or a list of "
            f"(path regex, PartitionSpec){did_you_mean(layout, LAYOUTS)}"
        )
    return layout


def check_layout(layout: Layout, mode: str) -> None:
    """Raise `ConfigError` where `mode` cannot hold `layout`, naming a mode that can."""
    name = layout_name(layout)
    modes = MODES_OF_LAYOUT[name]
    if mode not in modes:
        raise ConfigError(
            f"mode={mode!r} with layout={name!r}; there each device holds the whole state: use "
            f"mode={modes[0]!r}, or layout='replicated'"
        )


def state_shardings(state: TrainState, mesh: Mesh, layout: Layout) -> TrainState:
    """Where each array of `state` lives: its tree with `NamedSharding`s for leaves.

    Args:
        state: arrays or their shapes.
        mesh: the mesh they lie on.
        layout: see `Layout`.

    Raises:
        ConfigError: a rule names an axis that the mesh does not have, or does not divide a dim.
    """
    name = layout_name(layout)

    def everywhere(_path: str, _shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec()

    def over_replicas(_path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return _split_largest(shape, replica_count(mesh))

    def by_rule(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return _first_match(path, shape, mesh, layout if not isinstance(layout, str) else ())

    params, opt_state = {
        "replicated": (everywhere, everywhere),
        "zero1": (everywhere, over_replicas),
        "fsdp": (over_replicas, over_replicas),
        "rules": (by_rule, by_rule),
    }[name]
    return TrainState(
        step=NamedSharding(mesh, PartitionSpec()),
        params=_shardings(state.params, mesh, params),
        opt_state=_shardings(state.opt_state, mesh, opt_state),
        extras=_shardings(state.extras, mesh, everywhere),
        seed=NamedSharding(mesh, PartitionSpec()),
    )


def _shardings(tree: Any, mesh: Mesh, rule: Callable[[str, tuple[int, ...]], PartitionSpec]) -> Any:
    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, rule(jax.tree_util.keystr(path), tuple(leaf.shape)))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _split_largest(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    """Split the largest dim that `parts` divides; nothing where none does."""
    dims = [dim for dim, size in enumerate(shape) if size and size % parts == 0]
    if not dims:
        return PartitionSpec()
    largest = max(dims, key=lambda dim: shape[dim])
    return PartitionSpec(*(DATA if dim == largest else None for dim in range(len(shape))))


def _first_match(path: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> PartitionSpec:
    """The spec of the first rule found in `path`; replicated where none is, or for a scalar."""
    spec = next((spec for regex, spec in rules if re.search(regex, path)), PartitionSpec())
    if not shape:
        return PartitionSpec()
    for size, axes in zip(shape, spec, strict=False):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        missing = [axis for axis in names if axis not in mesh.axis_names]
        if missing:
            raise ConfigError(
                f"the rule for {path} names the axis {missing[0]!r}; the mesh has "
                f"{', '.join(mesh.axis_names)}: rename one of them"
            )
        devices = 1
        for axis in names:
            devices *= mesh.shape[axis]
        if size % devices:
            raise ConfigError(
                f"the rule for {path} splits a dim of {size} over {devices} devices; the devices "
                "must divide it: change the rule or the mesh"
            )
    return spec
