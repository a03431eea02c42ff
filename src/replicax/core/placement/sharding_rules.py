"""Layout rules: pairs of a path regex and a `PartitionSpec` that give each parameter its spec."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.ground.leaves import by_path
from replicax.core.placement.mesh import AnyMesh
from replicax.errors import ConfigError

Rules = Sequence[tuple[str, PartitionSpec]]
"""`(path regex, PartitionSpec)`; the first match applies to a parameter and its moments."""


def axes_of(spec: PartitionSpec) -> list[str]:
    """Return the names of the mesh axes in `spec`."""
    named = [entry for entry in spec if entry is not None]
    return [axis for entry in named for axis in ([entry] if isinstance(entry, str) else entry)]


def split_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Return the mesh axes of size above 1 that split an array, in mesh order."""
    split, sizes = axes_of(sharding.spec), sharding.mesh.shape
    return tuple(axis for axis in sizes if axis in split and sizes[axis] > 1)


def check_rules(rules: Rules) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return `rules`, or raise `ConfigError` if one is not a pair of a regex and a spec."""
    for rule in rules:
        if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)):
            raise ConfigError(
                f"the layout rule {rule!r} is not a (path regex, PartitionSpec) pair: make it one"
            )
        try:
            re.compile(rule[0])
        except (re.error, TypeError) as error:
            what = f"the layout rule {rule[0]!r} is not a regex ({error})"
            raise ConfigError(f"{what}: fix it") from error
    return tuple(rules)


def spec_by_rule(
    params: Any, mesh: AnyMesh, rules: Rules
) -> Callable[[str, tuple[int, ...]], PartitionSpec]:
    """Return `spec(path, shape)` for parameters and optimizer arrays, according to the rules.

    An optimizer array gets the spec of a parameter if its path ends in the parameter's path and
    their shapes are equal. `ConfigError` if a rule matches no parameter or is not applicable, or a
    parameter has no rule.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in by_path(params).items()}
    for regex, _ in rules:
        if not any(re.search(regex, path) for path in shapes):
            raise ConfigError(
                f"the layout rule {regex!r} matches none of the {len(shapes)} parameters, such "
                f"as {', '.join(list(shapes)[:3])}: fix the rule, or remove it"
            )
    specs: dict[str, PartitionSpec] = {}
    for path, shape in shapes.items() if rules else ():
        for found in [spec for regex, spec in rules if re.search(regex, path)][:1]:
            specs[path] = found if shape else PartitionSpec()
            _check_spec(path, shape, specs[path], mesh)
    left = [path for path in shapes if rules and path not in specs]
    if left:
        raise ConfigError(
            f"none of {len(rules)} layout rules matches {left[0]}, one of {len(left)} parameters "
            'without a rule; each needs one: add ("", PartitionSpec()) to replicate the rest'
        )

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        owners = [each for each in specs if path.endswith(each) and shapes[each] == shape]
        return specs[max(owners, key=len)] if owners else PartitionSpec()

    return spec


def _check_spec(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> None:
    """Raise `ConfigError` if `spec` cannot split `shape` over `mesh`."""
    if len(spec) > len(shape):
        raise ConfigError(
            f"the rule for {path} has {len(spec)} dims and the array {len(shape)}; a spec cannot "
            "have more than the array: shorten it, or add a separate rule for this path"
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
                f"the rule for {path} splits a dim of {size} over {devices} devices along "
                f"{', '.join(names)}; the devices must divide the dim: change the rule or the mesh"
            )
        used += names
    if len(set(used)) < len(used):
        raise ConfigError(
            f"the rule for {path} uses an axis twice ({spec}); an axis splits one dim: change it"
        )
