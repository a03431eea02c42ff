"""Rules on the numerics of a step that runs on each replica, based on patterns of common errors.

They see a single file and no values: if any function that a step calls may reduce, they report
nothing. `replicax verify --step` runs the step and proves it right or wrong.
"""

import ast
import builtins
import re
from collections.abc import Sequence

from replicax.lint.parsed import (
    GRADS,
    KEY_NAMES,
    PMAP,
    MappedCall,
    ParsedFile,
    given,
    keywords,
    names_in,
    targets,
)

REDUCES = re.compile(
    r"^(pmean|psum|psum_scatter|all_gather|all_to_all|pshuffle|ppermute|sync\w*|all_?reduce\w*"
    r"|cross_replica\w*|pmean_if_pmap|psum_if_pmap)$"
)
_UPDATES = ("update", "map", "apply_updates", "apply_gradients")
"""Calls that may be a step's update, the most certain last."""
_GRADIENT = re.compile(r"(^|_)(d?grads?|gradients?)(_tree|_total)?$")
_LIBRARY = re.compile(r"^(jax|flax|optax|numpy|equinox|haiku|functools|chex)\.")
_METRIC = re.compile(r"loss|metric|aux|acc|value|err|logs?$|stats|ppl|perplex|norm|state|correct")
_MASK = re.compile(r"mask|weight|valid|count|num_|n_tok|denom|padding|pads?$")
_SAMPLERS = re.compile(r"^jax\.random\.(?!key$|PRNGKey$|split$|fold_in$|wrap_key_data$|clone$)")
REPLICATES = {"flax.jax_utils.replicate", "jax.device_put_replicated"}
_NORMS = {"flax.linen.BatchNorm", "flax.nnx.BatchNorm", "haiku.BatchNorm"}
_AXES = {"axis_name", "cross_replica_axis", "cross_replica_axis_index_groups"}
_STATISTICS = re.compile(r"batch_stats|batch_statistics|model_state|bn_state|net_state")


class _Step:
    """A function that runs on each replica, with the functions of the file that it reaches."""

    def __init__(self, program: ParsedFile, mapped: MappedCall) -> None:
        self.mapped = mapped
        reached = program.reached(mapped.function)
        self.nodes = [node for function in reached for node in ast.walk(function)]
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.assigns = [node for node in self.nodes if isinstance(node, ast.Assign)]
        self.arguments = [each.arg for each in mapped.function.args.args]
        # A step without an axis name cannot reduce.
        self.is_nameless = mapped.kind in PMAP and "axis_name" not in mapped.options
        # Calls of a reduction, and calls that take one as an argument: `tree.map(pmean, ...)`.
        self.reductions = [
            call
            for call in self.calls
            if any(REDUCES.match(program.last_called(each)) for each in (call, *call.args))
        ]


def check_steps(program: ParsedFile) -> None:
    """Report common errors in functions of a file that run on each replica."""
    for mapped in program.mapped:
        step = _Step(program, mapped)
        _check_means(program, step)
        _check_scale(program, step.calls)
        if step.is_nameless or any(program.called(call) in GRADS for call in step.calls):
            if not mapped.sums_by_itself:
                _check_reduced(program, step)
            _check_keys(program, step)
            _check_norms(program, step)
    for functions in program.functions.values():
        for function in functions:
            calls = list(program.calls(function))
            # A function that averages over an axis is mapped over it, perhaps in another file.
            if any(program.called(call) in ("jax.lax.pmean", "jax.lax.psum") for call in calls):
                _check_scale(program, calls)


def _check_reduced(program: ParsedFile, step: _Step) -> None:
    """Report a step that updates parameters but reduces nothing except metrics."""
    for call in step.reductions:
        if not step.is_nameless and not all(map(_METRIC.search, _leaves(call))):
            return
    gradients = _gradient_names(program, step)
    update, surest = None, -1
    for call in step.calls:
        last = program.last_called(call)
        handed = bool(names_in(*given(call)) & gradients)
        subtracts = last != "map" or any(isinstance(each, ast.Sub) for each in ast.walk(call))
        if last in _UPDATES and subtracts and (handed or last == "apply_updates"):
            if _UPDATES.index(last) > surest:
                update, surest = call, _UPDATES.index(last)
        elif handed and not _is_known(program, call, last):
            return  # the call may reduce them
    if update is None or not gradients:
        return
    program.report(
        "no-reduction",
        update,
        "every replica updates its parameters with the gradient of its own rows, so they drift "
        "apart: nothing here reduces the gradient",
        "grads = jax.lax.pmean(grads, axis_name) before the update"
        + ("" if "axis_name" in step.mapped.options else ", and an axis_name to reduce over"),
    )


def _leaves(call: ast.Call) -> set[str]:
    """Return the names and strings in the argument of a reduction, or `?` if there are none."""
    maps = len(call.args) > 1 and ast.unparse(call.func).endswith("map")
    first = call.args[-1 if maps else 0] if call.args else call
    texts = {getattr(each, "value", None) for each in ast.walk(first)}
    return names_in(first) | {each for each in texts if isinstance(each, str)} or {"?"}


def _gradient_names(program: ParsedFile, step: _Step) -> set[str]:
    """Return the names of gradients: results of `grad`, and names that look like gradients."""
    makers = {"grad_fn", "value_and_grad_fn", "loss_grad_fn"}
    for node in step.assigns:
        if program.called(node.value) in GRADS:
            makers.update(targets(node))
    gradients: set[str] = set()
    for node in step.assigns:
        names, value = targets(node), node.value
        gradients.update(name for name in names if _GRADIENT.search(name))
        if not isinstance(value, ast.Call):
            continue
        makes = isinstance(value.func, ast.Call) and program.called(value.func) in GRADS
        if makes or program.last_called(value) in makers:
            pair = "value_and" in ast.unparse(value.func) or len(names) > 1
            gradients.update(names[-1:] if pair else names)
    return gradients


def _is_known(program: ParsedFile, call: ast.Call, last: str) -> bool:
    """Whether a call is known not to reduce."""
    name = program.called(call)
    return bool(_LIBRARY.match(name)) or last in program.functions or hasattr(builtins, name)


def _check_scale(program: ParsedFile, calls: Sequence[ast.Call]) -> None:
    """Report loss scaling that decides on each replica separately whether to skip a step."""
    for call in calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "value_and_grad":
            continue
        held = ast.unparse(call.func.value)
        if "scale" in held and "axis_name" not in keywords(call):
            program.report(
                "local-scale",
                call,
                "without an axis name nothing is reduced, and each replica skips steps and changes "
                "its scale based on its own rows",
                f"{held}.value_and_grad(..., axis_name=...) with the step's axis name",
            )


def _check_means(program: ParsedFile, step: _Step) -> None:
    """Report masked means that are averaged over replicas in a step that never sums counts."""
    lasts = {program.last_called(each) for call in step.reductions for each in (call, *call.args)}
    if "pmean" not in lasts or lasts & {"psum", "all_gather"}:
        return
    totals = {
        name
        for node in step.assigns
        if _sums(program, node.value) and _MASK.search(ast.unparse(node))
        for name in targets(node)
    }
    for node in step.nodes:
        if _is_masked_mean(program, node, totals):
            program.report(
                "mean-of-means",
                node,
                "each device divides by the count of its own rows, and the quotients are averaged "
                "over devices: a mean of means, which is wrong if the counts differ",
                "differentiate the local sum, then divide once: grads = psum(grads) / "
                "psum(count), loss = psum(total) / psum(count)",
            )


def _is_masked_mean(program: ParsedFile, node: ast.AST, totals: set[str]) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_total(program, node.right, totals) and _sums(program, node.left)
    weights = {"mean": "where", "average": "weights"}.get(program.last_called(node))
    return isinstance(node, ast.Call) and {"axis", weights} & keywords(node) == {weights}


def _is_total(program: ParsedFile, node: ast.AST, totals: set[str]) -> bool:
    """Whether a node is the full sum of a mask, possibly by name or guarded against 0."""
    if isinstance(node, ast.Name):
        return node.id in totals
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_total(program, node.left, totals)
    if not isinstance(node, ast.Call):
        return False
    if program.name(node.func).rpartition(".")[2] in ("maximum", "max", "clip") and node.args:
        return any(_is_total(program, each, totals) for each in (node.func, *node.args))
    return _sums(program, node) and bool(_MASK.search(ast.unparse(node)))


def _sums(program: ParsedFile, node: ast.AST) -> bool:
    """Whether a node is a sum over all elements of an array."""
    if isinstance(node, ast.Name):
        return bool(re.search(r"total|sum", node.id))
    if not isinstance(node, ast.Call) or {"axis", "keepdims"} & keywords(node):
        return False
    library = program.name(node.func) in ("jax.numpy.sum", "numpy.sum")
    return getattr(node.func, "attr", "") == "sum" and len(node.args) == int(library)


def _check_keys(program: ParsedFile, step: _Step) -> None:
    """Report a key shared by all replicas in a step that draws random numbers for its own rows."""
    ranks = {"axis_index", "process_index"}
    drawing = [call for call in step.calls if _draws(program, call)]
    if not drawing or any(program.last_called(call) in ranks for call in step.calls):
        return
    fixed = any(
        isinstance(node.value, ast.Call)
        and program.name(node.value.func) in ("jax.random.key", "jax.random.PRNGKey")
        and all(isinstance(each, ast.Constant) for each in node.value.args)
        for node in step.assigns
    )
    keys = {each for each in step.arguments if KEY_NAMES.search(each)}
    if fixed or keys & _whole(program, step):
        wrong = drawing[:1]
    else:
        wrong = _replicated(program, step, bool(keys)) if step.mapped.kind in PMAP else []
    for call in wrong:
        program.report(
            "shared-key",
            call,
            "every replica has the same key here, so all of them draw the same mask or noise for "
            "different rows",
            "key = jax.random.fold_in(key, jax.lax.axis_index(axis_name)) in the step, or "
            "jax.random.split(key, devices) before it",
        )


def _draws(program: ParsedFile, call: ast.Call) -> bool:
    name = program.called(call)
    if keywords(call) & {"rngs", "rng", "dropout_rng"}:
        return not name.rpartition(".")[2].startswith("init")
    shaped = any(".shape" in ast.unparse(each) for each in call.args)
    return bool(_SAMPLERS.match(name)) and shaped and "param" not in ast.unparse(call)


def _replicated(program: ParsedFile, step: _Step, by_name: bool) -> list[ast.Call]:
    """Return the calls that copy a key, or a container that holds one, to all devices."""
    copying = []
    handed = _handed_with_keys(program, step)
    for call in program.calls():
        if program.called(call) not in REPLICATES or not call.args:
            continue
        of_key = by_name and re.search(r"rng|key|seed", ast.unparse(call.args[0]))
        copies = names_in(call.args[0]) | set(targets(program.parents[call]))
        if of_key or copies & handed:
            copying.append(call)
    return copying


def _handed_with_keys(program: ParsedFile, step: _Step) -> set[str]:
    """Return the names passed to a step as an argument from which it reads a key: `state.rng`.

    Empty if the file splits keys over devices: `split(key, devices)`.
    """
    holders = {
        node.value.id
        for node in step.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and KEY_NAMES.search(node.attr)
    }
    places = [n for n, argument in enumerate(step.arguments) if argument in holders]
    names = {getattr(step.mapped.function, "name", "")}
    names.update(targets(program.parents[step.mapped.call]))
    handed: set[str] = set()
    for call in program.calls():
        last = program.last_called(call)
        if last == "shard_prng_key" or (
            last == "split" and not all(isinstance(each, ast.Constant) for each in call.args[1:])
        ):
            return set()
        if last in names and isinstance(call.func, ast.Name | ast.Attribute):
            method = isinstance(call.func, ast.Attribute) and step.arguments[:1] == ["self"]
            arguments = [getattr(call.func, "value", call), *call.args] if method else call.args
            handed |= names_in(*(arguments[n] for n in places if n < len(arguments)))
    return handed


def _whole(program: ParsedFile, step: _Step) -> set[str]:
    """Return the arguments that are equal on every replica, by `in_axes=None` or `P()`."""
    options = step.mapped.options
    specs: ast.AST | None = options.get("in_axes", options.get("in_specs"))
    if isinstance(specs, ast.Name):
        for node in program.nodes:
            if isinstance(node, ast.Assign) and specs.id in targets(node):
                specs = node.value
                break
    if not isinstance(specs, ast.Tuple):
        return set()
    return {
        argument
        for argument, spec in zip(step.arguments, specs.elts, strict=False)
        if ast.unparse(spec) in ("None", "P()", "PartitionSpec()")
    }


def _check_norms(program: ParsedFile, step: _Step) -> None:
    """Report BatchNorm whose statistics are separate on each replica."""
    written = {name or "" for call in step.calls for name in keywords(call)}
    if any(program.last_called(call) == "transform_with_state" for call in program.calls()):
        written |= names_in(*step.nodes[:1])  # Haiku's state is a regular argument
    if not any(map(_STATISTICS.search, written)) or _averages_statistics(program):
        return
    for call in program.calls():
        if program.called(call) in _NORMS and not keywords(call) & {*_AXES, None}:
            program.report(
                "local-batch-norm",
                call,
                "each replica normalizes over its own rows and keeps its own running statistics, "
                "which drift apart",
                "BatchNorm(axis_name=...) with the step's axis name, and pmean of batch_stats "
                "before saving them",
            )


def _averages_statistics(program: ParsedFile) -> bool:
    """Whether a file averages anything over replicas that may be statistics."""
    for call in program.calls():
        text = ast.unparse(call)
        named = _STATISTICS.search(text)
        if named and re.search(r"pmean|cross_replica|sync", text):
            return True
        if program.name(call.func) in PMAP and "pmean" in text and "lambda" in text:
            return True
    return False
