"""Flax in the style of its examples: NNX, a mesh, `nnx.jit`, whole batches only."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from job import (
    ACCUMULATE,
    BATCH,
    CLASSES,
    COORDINATOR,
    EPOCHS,
    FOLDER,
    HIDDEN,
    RANK,
    RATE,
    ROWS,
    WIDTH,
    WORLD,
    data,
    pause,
    save,
    weights,
)

if WORLD > 1:
    jax.distributed.initialize(COORDINATOR, WORLD, RANK)
mesh = jax.make_mesh((jax.device_count(),), ("data",))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


model = Network(nnx.Rngs(0))
layers = (model.hidden.kernel, model.hidden.bias, model.out.kernel, model.out.bias)
for layer, array in zip(layers, weights(), strict=True):
    layer.value = array
optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(RATE), ACCUMULATE), wrt=nnx.Param)


def replicate(tree):
    whole = NamedSharding(mesh, P())
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(whole, np.asarray(leaf)), tree
    )


def loss_fn(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


nnx.update((model, optimizer), replicate(nnx.state((model, optimizer))))
rows, size = data(), BATCH // ACCUMULATE
first_epoch = 0
if FOLDER:
    manager = ocp.CheckpointManager(FOLDER)
    if (newest := manager.latest_step()) is not None:
        state = nnx.to_pure_dict(nnx.state((model, optimizer)))
        state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        nnx.update((model, optimizer), state)
        first_epoch = newest + 1
for epoch in range(first_epoch, EPOCHS):
    for start in range(0, ROWS // size * size, size):  # drop_remainder=True
        part = size // WORLD
        begin = start + RANK * part
        split = NamedSharding(mesh, P("data"))
        batch = {
            name: jax.make_array_from_process_local_data(split, each[begin : begin + part])
            for name, each in rows.items()
        }
        pause()
        loss = train_step(model, optimizer, batch)
    if FOLDER:
        state = nnx.to_pure_dict(nnx.state((model, optimizer)))
        manager.save(epoch, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
save([layer.value for layer in layers])
