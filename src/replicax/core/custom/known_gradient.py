"""Derivatives of what a custom step gets from sums: the loss's is known, others are refused."""

from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from replicax.core.ground.leaves import PyTree
from replicax.core.step.loss import LOSS
from replicax.errors import LossError


@jax.custom_vjp
def of_known_gradient(_params: PyTree, *results: Any) -> Any:
    """Return `results`, the means, gradient and state; that is the loss's gradient by `params`."""
    return results


def _remembered(*given: Any) -> tuple[Any, PyTree]:
    perturbed = lambda leaf: hasattr(leaf, "perturbed")  # noqa: E731
    params, *values = jax.tree.map(lambda leaf: leaf.value, given, is_leaf=perturbed)
    return tuple(values), _once(params, values[1])


@jax.custom_jvp
def _once(_params: PyTree, gradient: PyTree) -> PyTree:
    """Return `gradient`, whose own derivative by `params` is unknown, and not 0."""
    return gradient


@partial(_once.defjvp, symbolic_zeros=True)
def _not_twice(primals: Any, tangents: Any) -> Any:
    if any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(tangents)):
        _refuse()
    return primals[1], tangents[1]


def _derivative(gradient: PyTree, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    of_loss, others = cotangents[0][LOSS], ({**cotangents[0], LOSS: None}, cotangents[1:])
    if any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(others)):
        _refuse()
    of_params = jax.tree.map(lambda leaf: (of_loss * leaf).astype(leaf.dtype), gradient)
    return of_params, None, None, None


of_known_gradient.defvjp(_remembered, _derivative, symbolic_zeros=True)
BACKWARD = _derivative.__name__
FORWARD = (
    "a forward-mode derivative (jax.jvp, jacfwd, linearize) was taken of "
    "rx.value_and_grad, whose loss has a known gradient in reverse mode only: take it of the loss "
    "inside, rx.value_and_grad(lambda m, batch, key: jax.jvp(lambda m: loss(m, batch, key), (m,), "
    "(v,))[1]), whose gradient is the Hessian times v"
)


@jax.jit
def sums_of_all_replicas(outputs: PyTree) -> PyTree:
    """Return `outputs`, equal on all replicas; `jaxprs.row_dependence` finds it by name."""
    return _constant(outputs)


@jax.custom_jvp
def _constant(outputs: PyTree) -> PyTree:
    """Return `outputs`, not differentiable: a replica's derivative is not the total derivative."""
    return outputs


@_constant.defjvp
def _refuse(*_: Any) -> Any:
    raise LossError(
        "rx.value_and_grad or rx.mean was differentiated, and only the loss of the former has a "
        "known derivative, once and by its model: pass rx.value_and_grad a loss that returns one "
        "value per row, differentiate only means['loss'], by the model, and take more derivatives "
        "inside of the loss"
    )
