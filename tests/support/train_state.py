"""The state of a training loop with an optimizer, as in Flax."""

from typing import Any

import jax
import optax
from flax import struct


class TrainState(struct.PyTreeNode):  # type: ignore[misc]
    params: Any
    opt_state: optax.OptState
    step: jax.typing.ArrayLike = 0
    batch_stats: Any = None
    apply_fn: Any = struct.field(pytree_node=False, default=None)
    tx: Any = struct.field(pytree_node=False, default=None)

    def apply_gradients(self, *, grads: Any, **changed: Any) -> "TrainState":
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        changed |= {"params": params, "opt_state": opt_state, "step": self.step + 1}
        return self.replace(**changed)
