"""A Wasserstein GAN with gradient penalty: two networks, and five critic updates in each step.

The step is written with `rx.value_and_grad`, one call for each sum over all rows of the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, NOISE, WIDTH, PENALTY, CRITIC_UPDATES = 84, 32, 4, 16, 10.0, 5

generator_optimizer = optax.adam(1e-3, b1=0.5, b2=0.9)
critic_optimizer = optax.adam(1e-3, b1=0.5, b2=0.9)


def rows():
    """Points on a ring, and for each row the noise of every update of a step."""
    random = np.random.default_rng(0)
    angle = random.uniform(0, 2 * np.pi, size=ROWS)
    noise = random.normal(size=(ROWS, CRITIC_UPDATES + 1, NOISE))
    return {
        "point": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32),
        "noise": noise.astype(np.float32),
        "mix": random.uniform(size=(ROWS, CRITIC_UPDATES, 1)).astype(np.float32),
    }


def state():
    """Two networks of two layers, each with the state of its optimizer."""
    generator, critic = jax.random.split(jax.random.key(0))
    generator, critic = network(generator, NOISE, 2), network(critic, 2, 1)
    return {
        "generator": generator,
        "critic": critic,
        "generator_moments": generator_optimizer.init(generator),
        "critic_moments": critic_optimizer.init(critic),
    }


def network(key, inputs, outputs):
    first, last = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (inputs, WIDTH)) / inputs**0.5,
        "out": jax.random.normal(last, (WIDTH, outputs)) / WIDTH**0.5,
    }


def apply(network, x):
    return jnp.tanh(x @ network["in"]) @ network["out"]


def critic_loss(critic, batch, key):
    """Score of the fake less that of the point, and a penalty on slopes other than 1."""
    point, fake = batch["point"], batch["fake"]
    mixed = fake + batch["mix"] * (point - fake)
    slope = jax.vmap(jax.grad(lambda x: apply(critic, x)[0]))(mixed)
    penalty = (jnp.sqrt(jnp.sum(slope**2, axis=1) + 1e-12) - 1) ** 2
    distance = apply(critic, point)[:, 0] - apply(critic, fake)[:, 0]
    return PENALTY * penalty - distance, {"distance": distance}


def step(state, batch, key):
    generator = state["generator"]

    def update_critic(carry, drawn):
        critic, moments = carry
        noise, mix = drawn
        seen = {"point": batch["point"], "fake": apply(generator, noise), "mix": mix}
        means, gradient = rx.value_and_grad(critic_loss)(critic, seen, key)
        updates, moments = critic_optimizer.update(gradient, moments, critic)
        return (optax.apply_updates(critic, updates), moments), means

    noise = jnp.moveaxis(batch["noise"], 1, 0)
    drawn = noise[:CRITIC_UPDATES], jnp.moveaxis(batch["mix"], 1, 0)
    carry, means = jax.lax.scan(update_critic, (state["critic"], state["critic_moments"]), drawn)
    critic, critic_moments = carry

    def fooled(generator, noise, key):
        return -apply(critic, apply(generator, noise))[:, 0]

    found, gradient = rx.value_and_grad(fooled)(generator, noise[-1], key)
    updates, moments = generator_optimizer.update(gradient, state["generator_moments"], generator)
    after = {
        "generator": optax.apply_updates(generator, updates),
        "critic": critic,
        "generator_moments": moments,
        "critic_moments": critic_moments,
    }
    return after, {"loss": found["loss"], "distance": means["distance"][-1]}


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(3):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
        print({name: round(float(value), 4) for name, value in metrics.items()})


if __name__ == "__main__":
    main()
