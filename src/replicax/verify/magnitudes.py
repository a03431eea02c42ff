"""A reduction used only by verify: the sum of magnitudes, which bounds a reduction's error."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from replicax.core.ground.leaves import PyTree
from replicax.core.placement.mesh import Axis
from replicax.core.step.base import StepSums
from replicax.core.step.reduction import Reduction, Wire


def _absolute(leaf: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(jnp.abs(leaf.real), jnp.abs(leaf.imag))
    return jnp.abs(leaf)


@dataclasses.dataclass(frozen=True)
class _Magnitudes(Wire):
    """Sum the magnitudes of the replicas' contributions, in any per-replica mode."""

    of: Callable[[jax.Array], jax.Array] = _absolute
    """Returns the magnitude of each value of a leaf."""

    def __call__(self, sums: StepSums, state: PyTree, axis: Axis) -> tuple[StepSums, PyTree]:
        """Return the sum of the replicas' magnitudes."""
        return super().__call__(self.rounded(sums), state, axis)

    def round(self, leaf: jax.Array) -> jax.Array:
        """Return the magnitudes of a contribution; sums of magnitudes are unchanged."""
        return self.of(leaf)


def magnitudes(reduction: Reduction) -> Wire:
    """Return the sum of what the errors of `reduction` are relative to."""
    return _Magnitudes("magnitudes", of=getattr(reduction, "magnitude", _absolute))
