"""Variables of a function while it is walked, and the replica it is walked for."""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from replicax.verify.rules.value import Value, merged

PMAP, SHARD_MAP, JIT = "pmap", "shard_map", "jit"


class Scope:
    """Names of one function or module, inside another scope."""

    def __init__(self, parent: "Scope | None", replica: "Replica | None") -> None:
        self.parent = parent
        self.replica = replica
        self.names: dict[str, Value] = {}

    def find(self, name: str, replica: "Replica | None") -> Value | None:
        """The value of `name`; from outside the replica's function it is the same on all."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                value = scope.names[name]
                outside = replica is not None and scope.replica is not replica
                return value.but(varies=False) if outside else value
            scope = scope.parent
        return None

    def merge(self, other: dict[str, Value]) -> None:
        """Join the names of the other branch into this scope's."""
        for name in {*self.names, *other}:
            mine, theirs = self.names.get(name), other.get(name)
            if mine is None or theirs is None:
                self.names[name] = mine or theirs or Value()
            elif mine is not theirs:
                self.names[name] = merged(mine, theirs)


@dataclasses.dataclass(eq=False)
class Parallel:
    """A function made parallel: by pmap, shard_map, or jit."""

    kind: str
    callee: Any
    node: ast.AST
    options: Mapping[str, Value]
    checks: bool = False
    """shard_map that checks replication, so differentiation sums over replicas by itself."""
    loop: int = 0
    result: Value | None = None
    replica: "Replica | None" = None


@dataclasses.dataclass(eq=False)
class Replica:
    """The function of one replica while it is walked."""

    parallel: Parallel
    differentiates: bool = False
    shared_keys: list[Any] = dataclasses.field(default_factory=list)
    differentiated: set[str] = dataclasses.field(default_factory=set)
    split: set[str] = dataclasses.field(default_factory=set)
    """Arguments of which each replica has its own part."""
    statistics: list[Any] = dataclasses.field(default_factory=list)

    @property
    def checks(self) -> bool:
        return self.parallel.checks

    @property
    def nameless(self) -> bool:
        """Pmap without an axis name: nothing in it can be reduced."""
        return self.parallel.kind == PMAP and "axis_name" not in self.parallel.options


@dataclasses.dataclass
class Loop:
    """A loop on the host while it is walked."""

    number: int
    node: ast.AST
    target: str
    scope: Scope
    guards: int = 0
    quiet: bool = False
    """A loop whose every turn may well be looked at: a few turns, or epochs."""
    each: bool = False
    """A loop over a literal list: of configurations, not of batches."""
