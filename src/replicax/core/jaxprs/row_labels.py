"""Names of functions by which an examined loss or step says where its rows are.

A function of such a name is called in the trace (`jax.jit`), so that it is found there again.
"""

from typing import Any

from jax.extend.core import ClosedJaxpr

from replicax.core.jaxprs.jaxpr import CALLS

GATHERED = "rows_gathered_already"
"""Name of the function that stands for `gather` if one device has the whole batch."""
SUMMED = "sums_of_all_replicas"
"""Name of the function that returns sums over the rows of all replicas."""
ENTERED = "rows_enter_a_loss"
"""Name of the function whose results are the rows that a loss in a custom step is given."""
LEFT = "rows_leave_a_loss"
"""Name of the function whose results are rows that a custom step gets back from a loss."""
KEYED = "key_of_a_loss"
"""Name of the function whose result is a loss's key, which each part of a batch has for itself."""
DECLARED = "rows_declared_independent"
"""Name of the function that declares rows independent."""
SEEN = "rows_seen_"
"""Prefix of the names of functions whose last result is recorded, in the place it has."""


def label_of(eqn: Any) -> str:
    """Return the name of the function that `eqn` calls, or nothing."""
    return eqn.params.get("name", "") if eqn.primitive.name in CALLS else ""


def row_dim(jaxpr: ClosedJaxpr) -> int:
    """Return the dim of the rows in a function that sums over them."""
    sums = (eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "reduce_sum")
    return int(next(sums).params["axes"][0])
