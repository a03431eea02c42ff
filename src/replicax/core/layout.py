"""Where each array of a train state lives: a table of layouts, and rules of one's own."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.leaves import is_random_key, numbers
from replicax.core.mesh import DATA, AnyMesh, by_rows, replica_count, replicated
from replicax.core.update import TrainState
from replicax.errors import ConfigError, choose

Rules = Sequence[tuple[str, PartitionSpec]]
"""`(path regex, PartitionSpec)`: the first match decides for a parameter and its moments."""

Rule = Callable[[str, tuple[int, ...]], PartitionSpec]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a train state live: on every device, unless it splits them."""

    name: str
    splits_optimizer: bool = False
    """Whether the optimizer's state is split over the replicas."""
    splits_params: bool = False
    """Whether the parameters are, too; the loss computes with whole ones."""
    rules: tuple[tuple[str, PartitionSpec], ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def is_whole(self) -> bool:
        """Whether each device holds the whole state."""
        return not (self.splits_optimizer or self.splits_params or self.rules)

    @property
    def axes(self) -> set[str]:
        """Names of the mesh axes that it splits something over."""
        named = (entry for _, spec in self.rules for entry in spec if entry is not None)
        return {axis for entry in named for axis in ([entry] if isinstance(entry, str) else entry)}

    def shardings(self, state: TrainState, mesh: AnyMesh) -> TrainState:
        """Return the tree of `state`, arrays or shapes, with `NamedSharding`s for leaves.

        Raises:
            ConfigError: a rule names an axis that the mesh does not have, or does not divide a dim.
        """

        def over_replicas(_path: str, shape: tuple[int, ...]) -> PartitionSpec:
            return _split_largest(shape, replica_count(mesh))

        rule = _by_rule(state.params, mesh, self.rules) if self.rules else over_replicas

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, rule(jax.tree_util.keystr(path), tuple(leaf.shape)))

        where = jax.tree.map(lambda _: replicated(mesh), state)
        split = {"reduction": jax.tree.map(lambda _: by_rows(mesh), state.reduction)}
        chosen = {"params": self.splits_params, "opt_state": self.splits_optimizer}
        for field in [name for name, splits in chosen.items() if splits or self.rules]:
            split[field] = jax.tree_util.tree_map_with_path(sharding, getattr(state, field))
        shardings: TrainState = dataclasses.replace(where, **split)
        return shardings


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("replicated"),
        Layout("zero1", splits_optimizer=True),
        Layout("fsdp", splits_optimizer=True, splits_params=True),
    )
}


def as_layout(layout: str | Rules | Layout) -> Layout:
    """Return the layout of that name, or of those rules, or raise `ConfigError`."""
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, Sequence) and not isinstance(layout, str):
        for rule in layout:
            _check_rule(rule)
        return Layout("rules", rules=tuple(layout))
    return choose("layout", layout, LAYOUTS, ", or a list of (path regex, PartitionSpec)")


def check_axes(layout: Layout, mesh: AnyMesh) -> None:
    """Raise `ConfigError` where devices along an axis would all compute the same."""
    for axis, size in mesh.shape.items():
        if size > 1 and axis != DATA and axis not in layout.axes:
            raise ConfigError(
                f"the mesh has {size} devices along {axis!r} and layout={layout.name!r} splits "
                f"nothing over it, and each would compute the same: leave {axis}={size} "
                f"out, or use layout rules that name {axis!r}"
            )


def _split_largest(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    """Split the largest dim that `parts` divides; nothing where none does."""
    dims = [dim for dim, size in enumerate(shape) if size and size % parts == 0]
    if not dims:
        return PartitionSpec()
    largest = max(dims, key=lambda dim: shape[dim])
    return PartitionSpec(*(DATA if dim == largest else None for dim in range(len(shape))))


def _check_rule(rule: Any) -> None:
    if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)):
        raise ConfigError(
            f"the layout rule {rule!r} is no pair (path regex, PartitionSpec); write it as one"
        )
    try:
        re.compile(rule[0])
    except (re.error, TypeError) as error:
        raise ConfigError(f"the layout rule {rule[0]!r} is no regex ({error}); mend it") from error


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


@jax.jit
def copied(tree: Any) -> Any:
    """Return arrays of their own with the same values, where those of `tree` live."""
    return jax.tree.map(jnp.copy, tree)
