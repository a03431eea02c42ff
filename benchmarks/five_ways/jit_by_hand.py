"""JAX by hand with `jit` and sharded arrays: a global view, XLA inserts the reduction."""

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
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
mesh = jax.make_mesh((jax.device_count(),), ("data",))
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
optimizer = optax.MultiSteps(optax.sgd(RATE), ACCUMULATE)


def loss_fn(params, batch):
    w1, b1, w2, b2 = params
    logits = jax.nn.relu(batch["x"] @ w1 + b1) @ w2 + b2
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


@jax.jit(donate_argnums=0, out_shardings=(whole, whole))
def step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


rows, size = data(), BATCH // ACCUMULATE
state = jax.device_put((weights(), optimizer.init(weights())), whole)
first_epoch = 0
if FOLDER:
    manager = ocp.CheckpointManager(FOLDER)
    if (newest := manager.latest_step()) is not None:
        state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        first_epoch = newest + 1
for epoch in range(first_epoch, EPOCHS):
    for start in range(0, ROWS // size * size, size):  # the last, indivisible batch is dropped
        part = size // WORLD
        begin = start + RANK * part
        batch = {
            name: jax.make_array_from_process_local_data(split, each[begin : begin + part])
            for name, each in rows.items()
        }
        pause()
        state, loss = step(state, batch)
    if FOLDER:
        manager.save(epoch, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
save(state[0])
