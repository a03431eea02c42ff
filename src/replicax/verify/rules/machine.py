"""Goes through the statements of a file with abstract values."""

import ast
from collections.abc import Callable, Sequence

from replicax.verify.rules import expressions
from replicax.verify.rules.finding import Spot, spot
from replicax.verify.rules.names import Imports
from replicax.verify.rules.report import Report
from replicax.verify.rules.scope import Loop, Parallel, Replica, Scope
from replicax.verify.rules.value import NOTHING, Function, Made, Value, derived, merged, unknown
from replicax.verify.rules.words import Words

_MOST_CALLS = 4000
"""Calls that are followed in one file; nothing is known of what further ones return."""
_MOST_EXPRESSIONS = 50_000
_MOST_DEEP = 16
_FEW_TURNS = 10
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Machine:
    """The walk through one file."""

    def __init__(self, tree: ast.Module, imports: Imports, report: Report) -> None:
        self.imports = imports
        self.report = report
        self.tree = tree
        self.module = Scope(None, None)
        self.replica: Replica | None = None
        self.traced = False
        """Within jit or a replica's function: no statement of the host."""
        self.loops: list[Loop] = []
        self.parallels: list[Parallel] = []
        self.waiting: list[Parallel] = []
        self.classes: dict[str, ast.ClassDef] = {}
        self.methods: dict[str, list[str]] = {}
        self.attributes: dict[tuple[str, str], Value] = {}
        self.walked: set[ast.AST] = set()
        self.stack: list[ast.AST] = []
        self.returns: list[list[Value]] = [[]]
        self.gathered: list[ast.AST] = []
        """Where the stacked axis of a pmap output is indexed."""
        self.file_has_mesh = False
        self.differentiations = 0
        self.differentiates: dict[Parallel, bool] = {}
        self.statistics: list[Spot] = []
        self.statement_of: ast.stmt | None = None
        """The statement being walked."""
        words = Words(tree, imports)
        self.rescales, self.multi_steps = words.rescales, words.multi_steps
        self.divides, self.constrains = words.divides, words.constrains
        self._calls = 0
        self._expressions = 0
        self._numbers = 0

    def run(self) -> None:
        """Walk the module, then every function that nothing in it has called."""
        for node in self.tree.body:
            if isinstance(node, _FunctionNode):
                self.module.names[node.name] = Value(callee=Function(node, self.module))
            elif isinstance(node, ast.ClassDef):
                self._define_class(node, self.module)
        self.block(self.tree.body, self.module)
        self._run_waiting()
        for node in self.tree.body:
            if isinstance(node, _FunctionNode):
                self._alone(Function(node, self.module))
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, _FunctionNode):
                        owned = Value(instance=node.name)
                        self._alone(Function(method, self.module, node.name, owned))
            self._run_waiting()

    def _alone(self, function: Function) -> None:
        if function.node in self.walked:
            return
        traced, self.traced = self.traced, _has_decorator(function.node, self)
        self.invoke(function, [], {}, missing=NOTHING)
        self.traced = traced

    def _run_waiting(self) -> None:
        from replicax.verify.rules.parallels import run_parallel

        while self.waiting:
            run_parallel(self, self.waiting.pop(0))

    # Statements

    def block(self, statements: Sequence[ast.stmt], scope: Scope) -> None:
        """Walk statements in order."""
        guarded = 0
        for statement in statements:
            if self.tired:
                break
            self.statement(statement, scope)
            # After `if step % 100: continue` the rest of the turn is guarded too.
            if isinstance(statement, ast.If) and _leaves(statement.body) and self.loops:
                self.loops[-1].guards += 1
                guarded += 1
        if guarded:
            self.loops[-1].guards -= guarded

    def statement(self, node: ast.stmt, scope: Scope) -> None:
        """Walk one statement."""
        self.statement_of = node
        visit: Callable[[ast.stmt, Scope], None] | None
        visit = getattr(self, f"_{type(node).__name__.lower()}", None)
        if visit is not None:
            visit(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child, scope)

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """What is known of an expression; nothing once the walk has gone on for too long."""
        self._expressions += 1
        if self.tired:
            return NOTHING
        return expressions.evaluate(self, node, scope)

    def _functiondef(self, node: _FunctionNode, scope: Scope) -> None:
        loop = self.loops[-1].number if self.loops else 0
        value = Value(callee=Function(node, scope, loop=loop))
        for decorator in reversed(node.decorator_list):
            maker = self.value(decorator, scope)
            value = expressions.decorated(self, maker, value, decorator, scope)
        scope.names[node.name] = value

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, scope: Scope) -> None:
        self._define_class(node, scope)
        for method in node.body:
            if isinstance(method, _FunctionNode):
                function = Value(
                    callee=Function(method, scope, node.name, Value(instance=node.name))
                )
                for decorator in reversed(method.decorator_list):
                    maker = self.value(decorator, scope)
                    function = expressions.decorated(self, maker, function, decorator, scope)
                if method.decorator_list:
                    self.attributes[node.name, method.name] = function

    def _define_class(self, node: ast.ClassDef, scope: Scope) -> None:
        self.classes[node.name] = node
        scope.names[node.name] = Value(callee=Made(node.name))
        for method in node.body:
            if isinstance(method, _FunctionNode):
                owners = self.methods.setdefault(method.name, [])
                if node.name not in owners:
                    owners.append(node.name)

    def _return(self, node: ast.Return, scope: Scope) -> None:
        value = self.value(node.value, scope) if node.value is not None else Value(varies=False)
        self.returns[-1].append(value)

    def _assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self.value(node.value, scope)
        for target in node.targets:
            self.bind(target, value, scope)

    def _annassign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value, scope), scope)

    def _augassign(self, node: ast.AugAssign, scope: Scope) -> None:
        load = ast.copy_location(_loaded(node.target), node.target)
        whole = ast.copy_location(ast.BinOp(load, node.op, node.value), node)
        self.bind(node.target, self.value(whole, scope), scope)

    def bind(self, target: ast.expr, value: Value, scope: Scope) -> None:
        """Assign `value` to a target, taking tuples apart."""
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for place, each in enumerate(target.elts):
                inner = each.value if isinstance(each, ast.Starred) else each
                starred = isinstance(each, ast.Starred)
                item = derived([value]) if starred else expressions.item(value, place)
                self.bind(inner, item, scope)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope)
            if owner.instance:
                self.attributes[owner.instance, target.attr] = value
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            held = scope.find(target.value.id, self.replica)
            if held is not None:
                scope.names[target.value.id] = expressions.with_item(held, target.slice, value)

    def _if(self, node: ast.If, scope: Scope) -> None:
        self.value(node.test, scope)
        name = expressions.compared_with_none(node.test)
        known = scope.find(name, self.replica) if name else None
        if known is not None and known.all_grads:
            self.block(node.orelse, scope)
            return
        before = dict(scope.names)
        self._guarded(node.body, scope)
        after = scope.names
        scope.names = before
        self._guarded(node.orelse, scope)
        if _leaves(node.body):
            return
        if _leaves(node.orelse):
            scope.names = after
            return
        scope.merge(after)

    def _guarded(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        if not self.loops:
            self.block(body, scope)
            return
        self.loops[-1].guards += 1
        self.block(body, scope)
        self.loops[-1].guards -= 1

    def _for(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        over = self.value(node.iter, scope)
        target = ast.unparse(node.target)
        element = derived([over]).but(target=target)
        loop = Loop(self._number(), node, target, scope, quiet=_quiet(node))
        loop.each = isinstance(node.iter, ast.Tuple | ast.List | ast.Set | ast.Dict)
        self._turns(node.body, scope, loop, lambda: self._bind_loop(node.target, element, scope))
        self.block(node.orelse, scope)

    _asyncfor = _for

    def _bind_loop(self, target: ast.expr, element: Value, scope: Scope) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._bind_loop(each, element, scope)
        else:
            self.bind(target, element.but(target=ast.unparse(target)), scope)

    def _while(self, node: ast.While, scope: Scope) -> None:
        loop = Loop(self._number(), node, "", scope)
        self._turns(node.body, scope, loop, lambda: self.value(node.test, scope))
        self.block(node.orelse, scope)

    def _turns(
        self, body: Sequence[ast.stmt], scope: Scope, loop: Loop, start: Callable[[], object]
    ) -> None:
        """Two turns of a loop: the second sees what the first has carried over."""
        before = dict(scope.names)
        if not self.traced and self.replica is None:
            self.loops.append(loop)
        for _ in range(2):
            start()
            self.block(body, scope)
        if self.loops and self.loops[-1] is loop:
            self.loops.pop()
        for name, value in before.items():
            now = scope.names.get(name, value)
            # A loop has at least one turn; only what it leaves alone is as before.
            scope.names[name] = now if now.all_grads or now.updates else merged(now, value)

    def _with(self, node: ast.With | ast.AsyncWith, scope: Scope) -> None:
        for each in node.items:
            value = self.value(each.context_expr, scope)
            if value.mesh:
                self.report.add(
                    "old-api",
                    spot(each.context_expr),
                    "`with mesh:` is deprecated since JAX 0.10",
                    "with jax.set_mesh(mesh): or pass mesh= where it is needed",
                    "note",
                )
            if each.optional_vars is not None:
                self.bind(each.optional_vars, value, scope)
        self.block(node.body, scope)

    _asyncwith = _with

    def _try(self, node: ast.Try, scope: Scope) -> None:
        self.block(node.body, scope)
        for handler in node.handlers:
            after = dict(scope.names)
            self._guarded(handler.body, scope)
            scope.names = after
        self.block(node.orelse, scope)
        self.block(node.finalbody, scope)

    # Calls

    def invoke(
        self,
        function: Function,
        args: Sequence[Value],
        keywords: dict[str, Value],
        *,
        missing: Value | None = None,
    ) -> Value:
        """The result of a function of the file, walked with these arguments."""
        node = function.node
        self._calls += 1
        given = [*args, *keywords.values()]
        if node in self.stack or len(self.stack) > _MOST_DEEP or self._calls > _MOST_CALLS:
            return unknown(given)
        self.walked.add(node)
        scope = Scope(function.scope, self.replica)
        if function.owner and function.receiver is not None and not _is_static(node):
            args = [function.receiver, *args]
        self._bind_arguments(node, args, keywords, scope, missing)
        self.stack.append(node)
        self.returns.append([])
        if isinstance(node, ast.Lambda):
            result = self.value(node.body, scope)
            self.returns.pop()
        else:
            self.block(node.body, scope)
            results = self.returns.pop()
            result = results[0] if results else Value(varies=False)
            for other in results[1:]:
                result = merged(result, other)
        self.stack.pop()
        return result

    def _bind_arguments(
        self,
        node: _FunctionNode | ast.Lambda,
        args: Sequence[Value],
        keywords: dict[str, Value],
        scope: Scope,
        missing: Value | None,
    ) -> None:
        listed = node.args
        positional = [*listed.posonlyargs, *listed.args]
        defaults = dict(zip([a.arg for a in positional][::-1], listed.defaults[::-1], strict=False))
        for each, default in zip(listed.kwonlyargs, listed.kw_defaults, strict=True):
            if default is not None:
                defaults[each.arg] = default
        left = list(args)
        spread = keywords.get("**")
        starred = any(value.name == "*" for value in left)
        for each in (*positional, *listed.kwonlyargs):
            if left and each not in listed.kwonlyargs and left[0].name != "*":
                value = left.pop(0)
            elif each.arg in keywords:
                value = keywords[each.arg]
            elif starred or spread is not None:
                value = unknown([*left, *([spread] if spread else [])])
            elif missing is not None:
                value = missing
            elif each.arg in defaults:
                value = self.value(defaults[each.arg], function_scope(scope)).but(varies=False)
            else:
                value = NOTHING
            scope.names[each.arg] = value
        if listed.vararg is not None:
            items = dict(enumerate(left))
            scope.names[listed.vararg.arg] = Value(items=items) if items else NOTHING
        if listed.kwarg is not None:
            scope.names[listed.kwarg.arg] = unknown(keywords.values())

    @property
    def tired(self) -> bool:
        """Whether the walk has gone on for too long; then nothing more is found."""
        return self._expressions > _MOST_EXPRESSIONS

    @property
    def incomplete(self) -> bool:
        """Whether a part of the file was not walked, because the walk took too long."""
        return self.tired or self._calls > _MOST_CALLS

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def function_scope(scope: Scope) -> Scope:
    """The scope in which a function's defaults are written."""
    return scope.parent or scope


def _has_decorator(node: ast.AST, machine: Machine) -> bool:
    """Whether a function is jitted where it is defined."""
    for decorator in getattr(node, "decorator_list", []):
        inner = decorator.func if isinstance(decorator, ast.Call) else decorator
        names = [machine.imports.written(inner)]
        if isinstance(decorator, ast.Call) and decorator.args:
            names.append(machine.imports.written(decorator.args[0]))
        if any(name.startswith(("jax.", "flax.nnx.", "equinox.")) for name in names):
            return True
    return False


def _is_static(node: ast.AST) -> bool:
    names = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
    return "staticmethod" in names


def _leaves(body: Sequence[ast.stmt]) -> bool:
    last = body[-1] if body else None
    return isinstance(last, ast.Return | ast.Continue | ast.Break | ast.Raise)


def _quiet(node: ast.For | ast.AsyncFor) -> bool:
    """A loop over epochs, or of a few turns: to look at each is no waste."""
    if "epoch" in ast.unparse(node.target).lower():
        return True
    over = node.iter
    if isinstance(over, ast.Tuple | ast.List):
        return True
    return (
        isinstance(over, ast.Call)
        and isinstance(over.func, ast.Name)
        and over.func.id == "range"
        and len(over.args) == 1
        and isinstance(over.args[0], ast.Constant)
        and isinstance(over.args[0].value, int)
        and over.args[0].value <= _FEW_TURNS
    )


def _loaded(target: ast.expr) -> ast.expr:
    copy = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(copy, target)
