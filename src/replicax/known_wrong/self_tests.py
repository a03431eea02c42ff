"""Programs of milliseconds that show whether this installation computes a wrong number."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from replicax.known_wrong.known_table import CompilerOptions

_ROWS = 40_000
"""With 32,769 rows one is wrong, with 65,536 none."""


def product_then_sum(options: CompilerOptions) -> bool:
    """Square rows by a vmapped product and a sum."""

    def squares(rows: jax.Array) -> jax.Array:
        matrix = jnp.eye(3, dtype=rows.dtype)
        return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(rows)

    numbers = np.arange(_ROWS, dtype=np.float32)
    rows = np.stack((numbers, 0 * numbers, 0 * numbers), axis=1)
    found = jax.jit(squares, compiler_options=dict(options))(rows)
    return bool(np.any(np.asarray(found) != numbers**2))


def gradient_of_max(options: CompilerOptions) -> bool:
    """Look for the rule that compares both operands with the result, to the last bit."""
    jaxpr = jax.make_jaxpr(jax.grad(jnp.maximum))(1.0, 2.0)
    return [eqn.primitive.name for eqn in jaxpr.eqns].count("eq") > 1


def eager_gather(options: CompilerOptions) -> bool:
    """Take the gradient of a gather of all entries, which is the cotangent."""
    rows = jnp.arange(256.0 * 8 * 128).reshape(256, 8, 128)
    every = jnp.arange(8)
    (found,) = jax.vjp(lambda array: array[:, every, :], rows)[1](rows)
    return bool(np.any(np.asarray(found) != np.asarray(rows)))


def operation_by_operation(options: CompilerOptions) -> bool:
    """Add and take a root, each as a program of its own."""
    two = np.asarray(jnp.ones(4) + 1)
    root = float(jnp.sqrt(jnp.float32(256)))
    return bool(np.any(two != 2)) or root != 16


def shifted_in_place(options: CompilerOptions) -> bool:
    """Move rows down by one, in a program that then reshapes them."""

    def shifted(rows: jax.Array) -> jax.Array:
        doubled = rows * 2
        return doubled.at[1:].set(doubled[:-1]).reshape(1, *rows.shape)

    rows = np.arange(128, dtype=np.float32).reshape(8, 16)
    found = np.asarray(jax.jit(shifted, compiler_options=dict(options))(rows))[0]
    return bool(np.any(found[1:] != 2 * rows[:-1]))


SELF_TESTS: Mapping[str, Callable[[CompilerOptions], bool]] = {
    test.__name__: test
    for test in (
        product_then_sum,
        gradient_of_max,
        eager_gather,
        operation_by_operation,
        shifted_in_place,
    )
}
"""Each returns whether a number is wrong, on the default device, in programs with `options`."""
