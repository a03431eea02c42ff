"""A training step that skips its update where that would do harm."""

import copy
import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data_parallel import DataParallel
from replicax.core.update import SPIKE_WINDOW, TrainState

_twins: "weakref.WeakKeyDictionary[DataParallel, dict[bool, DataParallel]]"
_twins = weakref.WeakKeyDictionary()


def guarded(dp: DataParallel, state: TrainState) -> DataParallel:
    """`dp`, but a bad step leaves all of the state as it was, except that `step` counts on.

    A step is bad where its loss or something in its gradient is not finite (or so large that its
    square is not), and, with a state of `with_losses`, where its loss is a spike. `step` then gives
    the metrics `replicax.core.update.NOT_FINITE` and `SPIKE`, and does not raise for a first
    loss that is not finite: who reads them decides. See `replicax.train.bad_steps`.

    That also keeps what an audit looks for: a flipped bit in one replica's weights can make
    everybody's next gradient NaN, and all replicas equal again if it were applied.

    Args:
        dp: anything; it stays as it is, and gets the same twin every time.
        state: of `dp`, or its shapes; the twin takes such as have `losses` where this one does.
    """
    spikes = bool(jax.tree.leaves(state.losses))
    twins = _twins.setdefault(dp, {})
    if spikes not in twins:
        twin = twins[spikes] = copy.copy(dp)
        twin._guard, twin._agreed = True, set()
        twin._fits = twin._finite = False
        shapes = jax.eval_shape(lambda leaf: leaf, state)
        twin._step = twin._lift_update(shapes, dp.mesh)
        if spikes:
            twin._score = twin._lift_score(shapes)
    return twins[spikes]


def with_losses(state: TrainState) -> TrainState:
    """`state` with a window of losses, still empty: a guarded step then skips spikes too.

    A spike is a loss that is `SPIKE_SIGMAS` standard deviations above the mean of the last
    `SPIKE_WINDOW` that were none, once there are as many.

    Args:
        state: arrays, or their shapes with shardings; one that has a window stays as it is.
    """
    if jax.tree.leaves(state.losses):
        return state
    shape, where = (SPIKE_WINDOW,), state.step.sharding
    if isinstance(state.step, jax.ShapeDtypeStruct):
        losses: object = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    else:
        nothing = np.full(shape, np.nan, np.float32)
        losses = jax.make_array_from_callback(shape, where, lambda part: nothing[part])
    return dataclasses.replace(state, losses=losses)
