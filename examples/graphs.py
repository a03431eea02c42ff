"""A graph network on graphs of different sizes, each padded to the largest: a row is a graph.

The model masks padded nodes within a row; Replicax masks padded graphs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

GRAPHS, BATCH, NODES, WIDTH = 84, 32, 12, 16


def rows():
    """`edge` `[graphs, nodes, nodes]`, `node` `[graphs, nodes]` (1 if real), and `triangles`."""
    random = np.random.default_rng(0)
    sizes = random.integers(4, NODES + 1, size=GRAPHS)
    node = (np.arange(NODES) < sizes[:, None]).astype(np.float32)
    upper = np.triu(random.random((GRAPHS, NODES, NODES)) < 0.35, 1)
    edge = (upper | upper.swapaxes(1, 2)) * node[:, :, None] * node[:, None, :]
    triangles = np.trace(edge @ edge @ edge, axis1=1, axis2=2) / 6
    return {
        "edge": edge.astype(np.float32),
        "node": node,
        "triangles": np.log1p(triangles).astype(np.float32),
    }


def model():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "start": jax.random.normal(keys[0], (2, WIDTH)),
        "rounds": jax.random.normal(keys[1], (3, 2 * WIDTH, WIDTH)) / WIDTH,
        "out": jax.random.normal(keys[2], (WIDTH,)) / WIDTH,
    }


def count(model, graph):
    """Predict log(1 + number of triangles) of one graph."""
    degree = jnp.sum(graph["edge"], axis=1)
    nodes = jnp.stack([graph["node"], degree], axis=1) @ model["start"]
    for weights in model["rounds"]:
        heard = graph["edge"] @ nodes / jnp.maximum(degree, 1)[:, None]
        nodes = jax.nn.relu(jnp.concatenate([nodes, heard], axis=1) @ weights)
    return jnp.sum(nodes * graph["node"][:, None], axis=0) @ model["out"]


def loss(model, batch, key):
    return (jax.vmap(count, in_axes=(None, 0))(model, batch) - batch["triangles"]) ** 2


def optimizer():
    return optax.adam(3e-3)


def main():
    dp = rx.DataParallel(loss, optimizer())
    state = dp.init(model())
    for epoch in range(60):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print(f"squared error {metrics['loss']:.3f}, {np.var(rows()['triangles']):.3f} by the mean")


if __name__ == "__main__":
    main()
