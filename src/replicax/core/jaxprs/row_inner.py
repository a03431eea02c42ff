"""Follow rows through loops, branches and solvers, and through derivatives that code defines."""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.ground.quick_compile import quick_options
from replicax.core.jaxprs.jaxpr import RULED, bind_eqn, closed, fixed_point, of_scan, shapes_of
from replicax.core.jaxprs.linear import Linearity, linear_results
from replicax.core.jaxprs.row_counts import Location, either, is_plain
from replicax.core.jaxprs.row_padding import FixedNumber, Padded, same_rows, shifted
from replicax.core.jaxprs.row_rules import MIXED, Rows


class Unlike(Exception):  # noqa: N818
    """Raised if two traces of a function, with different numbers of rows, do not correspond."""


Following = Callable[[ClosedJaxpr, ClosedJaxpr, list[Location]], list[Location]]
"""Follows rows through two traces, given the places of their inputs."""


def moved(eqn: Any, places: list[Location]) -> tuple[int, ...]:
    """Return the inputs by which the user may differentiate: floats of the state or the batch.

    A constant is never among them: the rule of a solver may refuse the times of its steps.
    """
    inputs = enumerate(zip(eqn.invars, places, strict=True))
    return tuple(n for n, (atom, place) in inputs if not is_constant(place) and moves(atom))


def is_constant(place: Location) -> bool:
    """Whether a value is a constant of the program, or computed from weights and constants."""
    return place is None or isinstance(place, FixedNumber) or getattr(place, "fixed", False)


@lru_cache(maxsize=256)
def derivative(eqn: Any, by: tuple[int, ...] | None = None) -> ClosedJaxpr:
    """Return the rule of an equation in `RULED`: of its inputs, and their or its own derivatives.

    It returns the results, and derivatives by the inputs `by`, or all floats: `custom_jvp_call`
    those of its results, `custom_vjp_call` those of the inputs.
    """
    given = shapes_of(eqn.invars)
    floats = [n for n, atom in enumerate(eqn.invars) if moves(atom)] if by is None else by
    forward = eqn.primitive.name == "custom_jvp_call"

    def run(values: list[Any], derivatives: list[Any]) -> Any:
        def of(*own: Any) -> Any:
            known = dict(enumerate(values)) | dict(zip(floats, own, strict=True))
            return bind_eqn(eqn, list(known.values()))

        own = tuple(values[n] for n in floats)
        if forward:
            return jax.jvp(of, own, tuple(derivatives))
        found, back = jax.vjp(of, *own)
        return found, back(derivatives)

    outs = shapes_of(eqn.outvars)
    jaxpr: ClosedJaxpr = jax.make_jaxpr(run)(given, [given[n] for n in floats] if forward else outs)
    return jaxpr


def backward_passes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the calls of functions with a backward pass that code defines."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_vjp_call":
            yield eqn
        for inner in called_by(eqn, ruled=False):
            yield from backward_passes(inner)


def calls_not_linear(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the calls of functions with a backward pass that is not linear in its cotangent."""
    for eqn in backward_passes(jaxpr):
        with contextlib.suppress(Exception):  # the user's own refusal, of any type
            if not is_linear(derivative(eqn), len(eqn.outvars)):
                yield eqn


def called_by(eqn: Any, ruled: bool) -> list[Jaxpr]:
    """Return the jaxprs in an equation's parameters; if `ruled`, and its rule."""
    values = [each for value in eqn.params.values() for each in _each(value)]
    found = [each for each in values if isinstance(each, ClosedJaxpr | Jaxpr)]
    if ruled and eqn.primitive.name in RULED:
        with contextlib.suppress(Exception):  # the rule may refuse, with an error of any type
            found.append(derivative(eqn))
    return [closed(each).jaxpr for each in found]


def _each(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)


def is_zero(whole: ClosedJaxpr, number: int) -> bool:
    """Whether the output of this number is 0 whatever the inputs are."""
    wanted = [n == number for n in range(len(whole.jaxpr.outvars))]
    jaxpr, used = dce_jaxpr(whole.jaxpr, wanted)
    if any(used):
        return False
    with jax.ensure_compile_time_eval():
        [found] = jaxpr_as_fun(ClosedJaxpr(jaxpr, whole.consts))()
        return not np.asarray(found).any()


def is_zero_at_zero(rule: ClosedJaxpr, results: int) -> bool:
    """Whether a backward pass returns 0 for cotangents of 0, as the trace shows or numbers tell.

    `rule` is that of a `custom_vjp_call` with so many results. One that cannot be computed here,
    such as a kernel for another device, is taken to be linear.
    """
    try:
        return shows_linear(rule, results) or not any(map(np.any, _derivatives(rule, results, 0)))
    except Exception:
        return True


_SCALES = 2.0**-6, 2.0**6
"""Factors of cotangents. A linear backward pass scales by them in all bits, and so does one that
rounds to a format in which they are powers of 2, such as float8_e5m2."""


def is_linear(rule: ClosedJaxpr, results: int) -> bool:
    """Whether a backward pass is linear in its cotangents, as the trace shows.

    Or else, whether it scales with them, as numbers tell; see `is_zero_at_zero`.
    """
    if shows_linear(rule, results):
        return True
    try:
        found = _derivatives(rule, results, 1)
        pairs = [
            (one * scale, scaled)
            for scale in _SCALES
            for one, scaled in zip(found, _derivatives(rule, results, scale), strict=True)
        ]
    except Exception:
        return True
    return all(np.allclose(*pair, rtol=1e-5, atol=1e-30, equal_nan=True) for pair in pairs)


def shows_linear(rule: ClosedJaxpr, results: int) -> bool:
    """Whether the trace of a backward pass shows that it is linear in its cotangents."""
    inputs = [Linearity.NONE] * (len(rule.in_avals) - results) + [Linearity.LINEAR] * results
    found = linear_results(rule, inputs)[results:]
    return not {Linearity.NONE, Linearity.OTHER}.intersection(found)


def _derivatives(rule: ClosedJaxpr, results: int, scale: float) -> list[np.ndarray]:
    """Return derivatives by random inputs of one sign, and of both, where it may be undefined."""
    values, cotangents = rule.in_avals[:-results], rule.in_avals[-results:]
    derivatives: list[np.ndarray] = []
    for lowest in (0.5, -1.5):
        random = np.random.default_rng(0)
        drawn = [random.uniform(lowest, 1.5, aval.shape).astype(aval.dtype) for aval in values]
        ones = [random.uniform(0.5, 1.5, aval.shape).astype(aval.dtype) for aval in cotangents]
        given = [(each * scale).astype(each.dtype) for each in ones]
        with jax.ensure_compile_time_eval():
            found = _compiled(rule)(*drawn, *given)[results:]
        floats = [each for each in found if jnp.issubdtype(each.dtype, jnp.floating)]
        arrays = [np.asarray(each, np.float64) for each in floats]
        defined = partial(np.nan_to_num, posinf=0, neginf=0)
        derivatives += arrays if lowest > 0 else map(defined, arrays)
    return derivatives


@lru_cache(maxsize=16)
def _compiled(rule: ClosedJaxpr) -> Any:
    """Return the function of a rule as one program, instead of one for each operation."""
    return jax.jit(jaxpr_as_fun(rule), compiler_options=quick_options(jax.default_backend()))


def moves(atom: Any) -> bool:
    """Whether a value has a derivative."""
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _scan(follow: Following, params: Any, twin: Any, places: list[Location]) -> list[Location]:
    fixed, carry, over = of_scan(params, places)
    steps = [shifted(each, -1) if _apart(each) else each and MIXED for each in over]
    body = lambda carry: follow(params["jaxpr"], twin["jaxpr"], [*fixed, *carry, *steps])  # noqa: E731
    carry, ys = fixed_point(body, carry, either)
    stacked = [_stacked(each) for each in ys]
    found = [*carry, *stacked]
    return [MIXED] * len(found) if params["length"] != twin["length"] else found


def _stacked(place: Location) -> Location:
    return shifted(place, 1) if _apart(place) or is_plain(place) else MIXED


def _apart(place: Location) -> bool:
    return isinstance(place, Rows | Padded)


def _while(follow: Following, params: Any, twin: Any, places: list[Location]) -> list[Location]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    body, carry = places[of_cond:][:of_body], places[of_cond + of_body :]
    run = lambda carry: follow(params["body_jaxpr"], twin["body_jaxpr"], [*body, *carry])  # noqa: E731
    carry, _ = fixed_point(run, carry, either)
    cond = params["cond_jaxpr"], twin["cond_jaxpr"]
    [goes_on] = follow(*cond, [*places[:of_cond], *carry])
    if isinstance(goes_on, Rows) and goes_on != MIXED:  # under vmap, each row has its own
        return [each if each == goes_on else MIXED for each in carry]
    if isinstance(goes_on, Padded):
        return [each if same_rows(each, goes_on) else MIXED for each in carry]
    return [MIXED] * len(carry) if goes_on else carry


def _cond(follow: Following, params: Any, twin: Any, places: list[Location]) -> list[Location]:
    which, *operands = places
    if len(params["branches"]) != len(twin["branches"]):
        raise Unlike
    pairs = zip(params["branches"], twin["branches"], strict=True)
    branches = [follow(*pair, operands) for pair in pairs]
    return [MIXED if which else either(each) for each in zip(*branches, strict=True)]


def _solve(follow: Following, params: Any, twin: Any, places: list[Location]) -> list[Location]:
    """Follow rows through a solver, and through products and solvers that its derivative needs."""
    lengths, found, right = params["const_lengths"], [], places[sum(params["const_lengths"]) :]
    for name, count in lengths._asdict().items():
        consts, places = places[:count], places[count:]
        one, two = (getattr(each["jaxprs"], name) for each in (params, twin))
        if one is not None:
            found.append(follow(one, two, [*consts, *right]))
    return [each[0] if len(set(each)) == 1 else MIXED for each in zip(*found, strict=True)]


WITH_INNER = {"scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _solve}
