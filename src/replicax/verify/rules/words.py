"""What a file says somewhere, which keeps rules silent everywhere in it."""

import ast

from replicax.verify.rules.names import Imports

_DROPS = {"drop_remainder", "drop_last"}


class Words:
    """Facts of a whole file.

    rescales: an optimizer that may divide by the number of devices.
    multi_steps: optax.MultiSteps, which averages micro-batches with equal weights.
    divides: the batch is made divisible, or is checked to be.
    constrains: with_sharding_constraint, by which jit splits what it is given.
    """

    def __init__(self, tree: ast.AST, imports: Imports) -> None:
        self.rescales = self.multi_steps = self.divides = self.constrains = False
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                self.divides = self.divides or not isinstance(node.left, ast.Constant)
            elif isinstance(node, ast.keyword):
                dropped = node.arg in _DROPS
                self.divides = self.divides or (dropped and not _is_false(node.value))
            elif isinstance(node, ast.Call):
                self._call(node, imports)

    def _call(self, node: ast.Call, imports: Imports) -> None:
        name = imports.written(node.func)
        last = ast.unparse(node.func).rpartition(".")[2]
        literal = bool(node.args) and isinstance(node.args[0], ast.Constant | ast.UnaryOp)
        self.rescales = self.rescales or (name == "optax.scale" and not literal)
        self.multi_steps = self.multi_steps or name == "optax.MultiSteps"
        self.divides = self.divides or last in ("pad", "pad_shard_unpad", "divmod", "gcd")
        self.constrains = self.constrains or last in ("with_sharding_constraint", "reshard")


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
