"""JAX by hand with `pmap`: reshape, `pmean`, a copy of the state on each device."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from job import (
    ACCUMULATE,
    BATCH,
    COORDINATOR,
    EPOCHS,
    FOLDER,
    RANK,
    RATE,
    ROWS,
    WORLD,
    data,
    pause,
    save,
    weights,
)

if WORLD > 1:
    jax.distributed.initialize(COORDINATOR, WORLD, RANK)
devices = jax.local_device_count()
optimizer = optax.MultiSteps(optax.sgd(RATE), ACCUMULATE)


def loss_fn(params, batch):
    w1, b1, w2, b2 = params
    logits = jax.nn.relu(batch["x"] @ w1 + b1) @ w2 + b2
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


@partial(jax.pmap, axis_name="replica", donate_argnums=(0, 1))
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    loss, grads = jax.lax.pmean((loss, grads), "replica")
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def replicate(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * devices), tree)


rows, size = data(), BATCH // ACCUMULATE
state = replicate((weights(), optimizer.init(weights())))
first_epoch = 0
if FOLDER:
    manager = ocp.CheckpointManager(FOLDER)
    if (newest := manager.latest_step()) is not None:
        saved = jax.tree.map(lambda leaf: leaf[0], state)
        state = replicate(manager.restore(newest, args=ocp.args.StandardRestore(saved)))
        first_epoch = newest + 1
for epoch in range(first_epoch, EPOCHS):
    for start in range(0, ROWS // size * size, size):  # the last, indivisible batch is dropped
        part = size // WORLD
        begin = start + RANK * part
        batch = {
            name: each[begin : begin + part].reshape(devices, -1, *each.shape[1:])
            for name, each in rows.items()
        }
        pause()
        *state, loss = step(*state, batch)
    if FOLDER:
        first = jax.tree.map(
            lambda leaf: jax.device_get(leaf.addressable_shards[0].data)[0], tuple(state)
        )
        manager.save(epoch, args=ocp.args.StandardSave(first))
        manager.wait_until_finished()
save([leaf.addressable_shards[0].data[0] for leaf in state[0]])
