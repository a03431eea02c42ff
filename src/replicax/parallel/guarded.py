"""A training step that does not wipe out what an audit looks for."""

import copy
import weakref
from collections import deque

import jax

from replicax.parallel.step import DataParallel
from replicax.parallel.update import TrainState

_twins: "weakref.WeakKeyDictionary[DataParallel, DataParallel]" = weakref.WeakKeyDictionary()


def guarded(dp: DataParallel, state: TrainState) -> DataParallel:
    """`dp`, but an update that is not finite leaves its parameter as it was.

    A flipped bit in one replica's weights can make everybody's next gradient NaN, after which all
    replicas would be equal again. So they stay different, until somebody looks. `step` then has the
    metric `replicax.parallel.update.NOT_FINITE`, which tells when to look.

    Args:
        dp: anything; it stays as it is, and gets the same twin every time.
        state: of `dp`.
    """
    if dp not in _twins:
        twin = _twins[dp] = copy.copy(dp)
        twin._guard, twin._finite, twin._agreed, twin._in_flight = True, False, set(), deque()
        twin._step = twin._lift_update(jax.eval_shape(lambda leaf: leaf, state), dp.mesh)
    return _twins[dp]
