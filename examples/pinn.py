"""A physics-informed network: Poisson's equation inside a square, and zero on its boundary.

The two sets of points have different sizes: each is an `rx.ExtraRows` of the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

INSIDE, BOUNDARY, WIDTH, STEPS, BOUNDARY_SHARE = 24, 10, 32, 1500, 20.0

optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))


def points(number, inside=INSIDE, boundary=BOUNDARY):
    """Draw the points of step `number`."""
    random = np.random.default_rng(number)
    edge, side = random.uniform(size=(boundary, 2)), random.integers(4, size=boundary)
    edge[np.arange(boundary), side // 2] = side % 2
    sets = {"inside": random.uniform(size=(inside, 2)), "boundary": edge}
    return {name: rx.ExtraRows(x.astype(np.float32)) for name, x in sets.items()}


def state():
    """A three-layer network and its optimizer state."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "in": jax.random.normal(keys[0], (2, WIDTH)) * 2,
        "bias": jnp.linspace(-2, 2, WIDTH),
        "middle": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(keys[2], (WIDTH,)) / WIDTH**0.5,
    }
    return {"model": model, "moments": optimizer.init(model)}


def height(model, x):
    hidden = jnp.tanh(x @ model["in"] + model["bias"])
    return jnp.tanh(hidden @ model["middle"]) @ model["out"]


def solution(x):
    return jnp.prod(jnp.sin(jnp.pi * x), axis=-1)


def residual(model, x, key):
    """Squared error of the equation at each point: the Laplacian is -2 pi² times the solution."""
    bend = jax.vmap(lambda one: jnp.trace(jax.hessian(height, argnums=1)(model, one)))(x)
    return (bend / (2 * jnp.pi**2) + solution(x)) ** 2


def off_zero(model, x, key):
    """Squared height at each point of the boundary."""
    return jax.vmap(height, (None, 0))(model, x) ** 2


def step(state, batch, key):
    model = state["model"]
    inside, of_inside = rx.value_and_grad(residual)(model, batch["inside"], key)
    edge, of_edge = rx.value_and_grad(off_zero)(model, batch["boundary"], key)
    gradient = optax.tree.add_scale(of_inside, BOUNDARY_SHARE, of_edge)
    updates, moments = optimizer.update(gradient, state["moments"], model)
    metrics = {"loss": inside["loss"] + BOUNDARY_SHARE * edge["loss"], "edge": edge["loss"]}
    found = batch["inside"].map(lambda x: (height(model, x) - solution(x)) ** 2)
    metrics["error"] = jnp.sqrt(rx.mean(found))
    return {"model": optax.apply_updates(model, updates), "moments": moments}, metrics


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for number in range(STEPS):
        trained, metrics = dp.step(trained, points(number))
    print({name: round(float(value), 5) for name, value in metrics.items()})


if __name__ == "__main__":
    main()
