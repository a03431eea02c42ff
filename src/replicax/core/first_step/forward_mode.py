"""Find forward-mode derivatives of what has a backward pass alone, in a trace."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.custom.known_gradient import BACKWARD, FORWARD
from replicax.core.jaxprs.jaxpr import closed
from replicax.errors import LossError


def check_reverse(traced: ClosedJaxpr) -> None:
    """Raise `LossError` if something with a backward pass alone is differentiated forward.

    JAX raises a `TypeError` when it compiles that, which does not tell of what.
    """
    if not any(_forward(traced.jaxpr)):
        return
    used, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    for name in _forward(used):
        raise LossError(
            FORWARD
            if name == BACKWARD
            else "a forward-mode derivative (jax.jvp, jacfwd, linearize) was taken of a function "
            f"with the backward pass {name} (jax.custom_vjp), which has no other derivative: use "
            "jax.grad or jax.vjp there, or define the function with jax.custom_jvp"
        )


def _forward(jaxpr: Any) -> Iterator[str]:
    """Yield the names of backward passes of what is differentiated forward."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_lin":
            yield getattr(eqn.params["bwd"], "__name__", "")
        for inner in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _forward(closed(inner).jaxpr)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)
