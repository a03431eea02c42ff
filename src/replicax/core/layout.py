"""Abstract state + mesh + rule -> where each array lives."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.mesh import DATA, AnyMesh, replica_count
from replicax.core.random_keys import is_random_key, numbers
from replicax.core.update import TrainState
from replicax.errors import ConfigError, did_you_mean

LAYOUTS = ("replicated", "zero1", "fsdp")

Rules = Sequence[tuple[str, PartitionSpec]]
Layout = str | Rules
"""A name of `LAYOUTS`, or rules: `(path regex, PartitionSpec)`, the first match deciding.

- replicated  every device holds everything
- zero1       the optimizer's state is split over the replicas
- fsdp        the parameters too
- rules       each parameter, and the optimizer's copies of it, as its rule says
"""

Rule = Callable[[str, tuple[int, ...]], PartitionSpec]

MODES_OF_LAYOUT = {
    "replicated": ("single", "jit", "shard_map", "pmap", "exact"),
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
        _check_rules(layout)
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


def state_shardings(state: TrainState, mesh: AnyMesh, layout: Layout) -> TrainState:
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

    by_rule = _by_rule(state.params, mesh, layout) if not isinstance(layout, str) else everywhere
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
        losses=_shardings(state.losses, mesh, everywhere),
    )


def _shardings(tree: Any, mesh: AnyMesh, rule: Rule) -> Any:
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


def _check_rules(rules: Any) -> None:
    if not isinstance(rules, Sequence):
        raise ConfigError(
            f"layout={rules!r}; it is one of {', '.join(LAYOUTS)}, or a list of "
            "(path regex, PartitionSpec)"
        )
    for rule in rules:
        if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)):
            raise ConfigError(
                f"the layout rule {rule!r} is no pair (path regex, PartitionSpec); write it as one"
            )
        try:
            re.compile(rule[0])
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"the layout rule {rule[0]!r} is no regex ({error}); mend it"
            ) from error


def _by_rule(params: Any, mesh: AnyMesh, rules: Rules) -> Rule:
    """The specs of params by their rules; the optimizer's arrays follow the param they end in."""
    shapes = {
        jax.tree_util.keystr(keys): tuple(leaf.shape)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    for regex, _ in rules:
        if not any(re.search(regex, path) for path in shapes):
            raise ConfigError(
                f"the layout rule {regex!r} is found in none of the {len(shapes)} parameters, such "
                f"as {', '.join(list(shapes)[:3])}; mend the rule, or take it out"
            )
    specs: dict[str, PartitionSpec] = {}
    for path, shape in shapes.items():
        found = (spec for regex, spec in rules if re.search(regex, path))
        specs[path] = next(found, PartitionSpec()) if shape else PartitionSpec()
        _check_spec(path, shape, specs[path], mesh)

    def rule(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        owners = [each for each in specs if path.endswith(each) and shapes[each] == shape]
        return specs[max(owners, key=len)] if owners else PartitionSpec()

    return rule


def _check_spec(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> None:
    """Raise `ConfigError` where `spec` cannot split `shape` over `mesh`."""
    if len(spec) > len(shape):
        raise ConfigError(
            f"the rule for {path} has {len(spec)} dims and the array {len(shape)}; a spec has at "
            "most the array's: shorten it, or give this path a rule of its own"
        )
    used: list[str] = []
    for size, axes in zip(shape, spec, strict=False):
        names = [axes] if isinstance(axes, str) else list(axes or ())
        missing = [axis for axis in names if axis not in mesh.axis_names]
        if missing:
            raise ConfigError(
                f"the rule for {path} names the axis {missing[0]!r}; the mesh has "
                f"{', '.join(mesh.axis_names)}: rename one of them"
            )
        devices = math.prod(mesh.shape[axis] for axis in names)
        if size % devices:
            raise ConfigError(
                f"the rule for {path} splits a dim of {size} over {devices} devices; the devices "
                "must divide it: change the rule or the mesh"
            )
        used += names
    if len(set(used)) < len(used):
        raise ConfigError(
            f"the rule for {path} uses an axis twice ({spec}); an axis splits one dim: change it"
        )


def on_devices_of(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """`leaf`, moved where it lives on other devices than those of `sharding`."""
    if not sharding.is_fully_addressable and getattr(leaf, "is_fully_addressable", True):
        # device_put would compare the whole array with every process's once more.
        if is_random_key(leaf):
            data = on_devices_of(numbers(leaf), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set != sharding.device_set:
        return jax.device_put(leaf, sharding)
    return leaf
