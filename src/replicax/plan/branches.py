"""A traced function in which `lax.platform_dependent` has been decided for one platform."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


def for_platform(jaxpr: Jaxpr, platform: str) -> Jaxpr:
    """`jaxpr` with the branches of `platform` in place of every choice by platform.

    Done before differentiation: the derivative of a choice keeps what any of its branches wants.

    Args:
        jaxpr: of a function that is not yet differentiated.
        platform: `cpu`, `cuda`, `tpu`, ...
    """
    equations: list[JaxprEqn] = []
    same: dict[Any, Any] = {}

    def known(variable: Any) -> Any:
        while not isinstance(variable, Literal) and variable in same:
            variable = same[variable]
        return variable

    for equation in jaxpr.eqns:
        branch = branch_for(equation, platform)
        if branch is None:
            params = {name: _inside(value, platform) for name, value in equation.params.items()}
            invars = [known(variable) for variable in equation.invars]
            equations.append(equation.replace(invars=invars, params=params))
            continue
        body = for_platform(branch.jaxpr, platform)
        same.update(zip(body.invars, map(known, equation.invars[1:]), strict=True))
        for inner in body.eqns:
            equations.append(inner.replace(invars=[known(each) for each in inner.invars]))
        same.update(zip(equation.outvars, map(known, body.outvars), strict=True))
    outvars = [known(each) for each in jaxpr.outvars]
    decided: Jaxpr = jaxpr.replace(eqns=equations, outvars=outvars)
    return decided


def branch_for(equation: JaxprEqn, platform: str) -> ClosedJaxpr | None:
    """The branch that `platform` takes; None where `equation` is no choice by platform."""
    platforms = equation.params.get("branches_platforms")
    if equation.primitive.name != "cond" or platforms is None:
        return None
    branches: tuple[ClosedJaxpr, ...] = equation.params["branches"]
    taken = (
        branch
        for branch, names in zip(branches, platforms, strict=True)
        if names is None or platform in names
    )
    return next(taken, branches[-1])


def _inside(value: Any, platform: str) -> Any:
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=for_platform(value.jaxpr, platform))
    if isinstance(value, Jaxpr):
        return for_platform(value, platform)
    if type(value) in (tuple, list):
        return type(value)(_inside(each, platform) for each in value)
    return value
