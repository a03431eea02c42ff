"""Facts in the program of a loss: draws that follow from no key, parameters without gradient."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from replicax.core.batch import Batch
from replicax.core.loss import LOSS
from replicax.core.models.definition import View
from replicax.core.objective import Objective
from replicax.core.update import TrainState

_CALLS = frozenset({"jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call"})
NOTHING: frozenset[int] = frozenset()
_DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})


def draws_from_a_constant(jaxpr: Jaxpr, keyed: Sequence[bool]) -> bool:
    """Whether a traced function draws random numbers that depend on none of some arguments.

    Args:
        jaxpr: of the function.
        keyed: for each of its arguments, whether draws may depend on it.
    """
    return _follow(jaxpr, keyed)[1]


def _follow(jaxpr: Jaxpr, keyed: Sequence[bool]) -> tuple[list[bool], bool]:
    """Which results depend on the arguments that are `keyed`, and whether a draw does not."""
    known: dict[Any, bool] = dict(zip(jaxpr.invars, keyed, strict=True))

    def depends(variable: Any) -> bool:
        return not isinstance(variable, Literal) and known.get(variable, False)

    drawn = False
    for equation in jaxpr.eqns:
        inputs = [depends(variable) for variable in equation.invars]
        outputs = [any(inputs)] * len(equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            # Loops and branches have more inputs than their bodies, or others: as a whole then.
            alike = len(inner.invars) == len(inputs)
            entered = inputs if alike else [any(inputs)] * len(inner.invars)
            results, inside = _follow(inner, entered)
            drawn |= inside
            if alike and len(results) == len(outputs):
                outputs = results
        if equation.primitive.name in _DRAWS and not any(inputs):
            drawn = True
        known.update(zip(equation.outvars, outputs, strict=True))
    return [depends(variable) for variable in jaxpr.outvars], drawn


def loss_draws_from_a_constant(objective: Objective, state: TrainState, batch: Batch) -> bool:
    """Whether a loss in training draws random numbers that do not depend on its key."""

    def traced(key_data: jax.Array, rest: Any) -> Any:
        params, extras, rows = rest
        key = jax.random.wrap_key_data(key_data)
        return objective.loss_sums(params, extras, rows, View(key))[0]

    rest = (state.params, state.extras, batch)
    key_data = jax.random.key_data(jax.random.key(0))
    jaxpr = jax.make_jaxpr(traced)(key_data, rest).jaxpr
    keyed = [True] + [False] * (len(jaxpr.invars) - 1)
    return draws_from_a_constant(jaxpr, keyed)


def dead_and_stopped(
    objective: Objective, state: TrainState, batch: Batch
) -> tuple[list[str], list[str]]:
    """Return the parameters that nothing of the loss follows from, and those without gradient.

    The program is asked and not the rows: a parameter that these rows do not use is neither.
    """

    def total(params: Any, extras: Any, rows: Batch) -> Any:
        sums = objective.loss_sums(params, extras, rows, View(jax.random.key(0)))[0]
        return sums[LOSS].total, sums

    gradient = jax.value_and_grad(total, has_aux=True)
    traced = jax.make_jaxpr(gradient)(state.params, state.extras, batch)
    inputs, count = len(traced.jaxpr.invars), len(jax.tree.leaves(state.params))
    own = [frozenset([each]) if each < count else NOTHING for each in range(inputs)]
    follows = _sources(traced.jaxpr, own)
    reaching = NOTHING.union(*follows[:-count])
    # A gradient that is 0 whatever the parameters and rows are is a constant of the program.
    varying = _sources(traced.jaxpr, [frozenset([0])] * inputs, of_constants=frozenset([0]))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.params)]
    dead = [path for each, path in enumerate(paths) if each not in reaching]
    without = [path for path, each in zip(paths, varying[-count:], strict=True) if not each]
    return dead, [path for path in without if path not in dead]


def _sources(
    jaxpr: Jaxpr, inputs: Sequence[frozenset[int]], of_constants: frozenset[int] = NOTHING
) -> list[frozenset[int]]:
    """For each result the inputs that it follows from; loops and branches are taken as a whole."""
    known: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= dict.fromkeys(jaxpr.constvars, of_constants)

    def of(variable: Any) -> frozenset[int]:
        return NOTHING if isinstance(variable, Literal) else known.get(variable, NOTHING)

    for equation in jaxpr.eqns:
        entered = [of(variable) for variable in equation.invars]
        outputs = [NOTHING.union(*entered)] * len(equation.outvars)
        inner = list(jaxprs_in_params(equation.params))
        called = equation.primitive.name in _CALLS and len(inner) == 1
        if called and len(inner[0].invars) == len(entered):
            outputs = _sources(inner[0], entered)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [of(variable) for variable in jaxpr.outvars]
