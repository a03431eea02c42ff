"""Canonical names of what a file imports: `from jax.lax import pmean as pm` makes `pm` that."""

import ast
import re
from collections.abc import Iterator

_ALIASES = {
    "jax.tree_util.tree_map": "jax.tree.map",
    "jax.tree_map": "jax.tree.map",
    "jax.tree_multimap": "jax.tree.map",
    "jax.tree_util.tree_multimap": "jax.tree.map",
    "jax.P": "jax.sharding.PartitionSpec",
    "jax.NamedSharding": "jax.sharding.NamedSharding",
    "jax.experimental.maps.Mesh": "jax.sharding.Mesh",
    "jax.interpreters.pxla.Mesh": "jax.sharding.Mesh",
    "jax.experimental.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.interpreters.pxla.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.experimental.pjit.PartitionSpec": "jax.sharding.PartitionSpec",
    "flax.nnx.pmap": "jax.pmap",
    "flax.nnx.jit": "jax.jit",
    "flax.nnx.shard_map": "jax.shard_map",
    "jax.experimental.pjit.pjit": "jax.jit",
    "equinox.filter_jit": "jax.jit",
    "equinox.filter_pmap": "jax.pmap",
    "equinox.filter_vmap": "jax.vmap",
    "flax.nnx.vmap": "jax.vmap",
    "flax.nnx.scan": "nnx.scan",
    "flax.nnx.grad": "jax.grad",
    "flax.nnx.value_and_grad": "jax.value_and_grad",
    "equinox.filter_grad": "jax.grad",
    "equinox.filter_value_and_grad": "jax.value_and_grad",
    "haiku.grad": "jax.grad",
    "haiku.value_and_grad": "jax.value_and_grad",
    "jax.random.PRNGKey": "jax.random.key",
    "jax.remat": "jax.checkpoint",
}
_CUSTOMARY = {
    "jax": "jax",
    "jnp": "jax.numpy",
    "np": "numpy",
    "lax": "jax.lax",
    "optax": "optax",
    "nnx": "flax.nnx",
    "jax_utils": "flax.jax_utils",
    "print": "print",
    "float": "float",
    "int": "int",
    "len": "len",
    "range": "range",
    "zip": "zip",
    "enumerate": "enumerate",
    "sum": "sum",
    "max": "max",
    "min": "min",
}
"""Names a snippet uses without importing them, and builtins that some rule asks for."""


BATCH = re.compile(r"^(\w+_)?(batch|images?|labels?|inputs?|targets?|tokens|xs?|ys?|data)$")
"""What people call a batch and its parts."""


class Imports:
    """The imports of one file, wherever in it they stand."""

    def __init__(self, tree: ast.AST) -> None:
        self.names: dict[str, str] = {}
        self.statements: list[tuple[str, ast.stmt]] = []
        """Every imported name in full as written, with its statement."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.statements.append((alias.name, node))
                    local = alias.asname or alias.name.partition(".")[0]
                    self.names[local] = alias.name if alias.asname else local
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    self.statements.append((full, node))
                    self.names[alias.asname or alias.name] = full

    def root(self, name: str) -> str:
        """What a bare `name` stands for, where no variable has that name; empty if unknown."""
        return self.names.get(name, _CUSTOMARY.get(name, ""))

    def written(self, node: ast.AST) -> str:
        """The full name that `node` writes, before it is made canonical; empty if it is none."""
        if isinstance(node, ast.Name):
            return self.root(node.id)
        if isinstance(node, ast.Attribute):
            base = self.written(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""


def canonical(name: str) -> str:
    """The one name under which the rules know `name`."""
    return _ALIASES.get(name, name)


def walked(tree: ast.AST) -> Iterator[ast.Name | ast.Attribute]:
    """Every name and attribute that is read, the longest of a dotted one only."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            yield node
