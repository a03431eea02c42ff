"""A loss that computes nothing again in its backward pass: what a model's own FLOPs are."""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params

from replicax.core.objective import LossFunction


def keeping_everything(loss: LossFunction) -> LossFunction:
    """Return `loss`, but each `jax.checkpoint` in it keeps all that its backward pass needs."""

    def kept(model: Any, batch: Any, key: jax.Array | None) -> Any:
        def of_batch(batch: Any, key: jax.Array | None) -> Any:
            return loss(model, batch, key)

        traced, shapes = jax.make_jaxpr(of_batch, return_shape=True)(batch, key)
        found = jaxpr_as_fun(_keeping(traced))(*jax.tree.leaves((batch, key)))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return kept


def computes_again(jaxpr: Jaxpr) -> bool:
    """Whether there is a `jax.checkpoint` in it."""
    return any(
        _is_checkpoint(eqn) or any(map(computes_again, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _keeping(value: Any) -> Any:
    """A parameter of an equation, with the policy replaced in all jaxprs that it holds."""
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=_keeping(value.jaxpr))
    if isinstance(value, Jaxpr):
        return value.replace(eqns=[_of_equation(eqn) for eqn in value.eqns])
    if isinstance(value, tuple | list):
        return type(value)(map(_keeping, value)) if type(value) in (tuple, list) else value
    return value


def _of_equation(eqn: JaxprEqn) -> JaxprEqn:
    params = {name: _keeping(value) for name, value in eqn.params.items()}
    if _is_checkpoint(eqn):
        params["policy"] = jax.checkpoint_policies.everything_saveable
    replaced: JaxprEqn = eqn.replace(params=params)
    return replaced


def _is_checkpoint(eqn: JaxprEqn) -> bool:
    return {"policy", "prevent_cse"} <= eqn.params.keys()
