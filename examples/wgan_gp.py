"""A Wasserstein GAN with gradient penalty: two networks, and five critic updates per step.

The step is written with `rx.value_and_grad`, one call for each sum over all rows of the batch.
`rx.Run` yields the batches; a hook smooths the critic's distance and reports that to the ring.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, STEPS, NOISE, WIDTH, PENALTY, CRITIC_UPDATES = 84, 32, 500, 4, 32, 10.0, 5

generator_optimizer = optax.adam(5e-4, b1=0.0, b2=0.9)
critic_optimizer = optax.adam(3e-3, b1=0.0, b2=0.9)


def rows():
    """Points on a ring, and for each row the noise for every update of a step."""
    random = np.random.default_rng(0)
    angle = random.uniform(0, 2 * np.pi, size=ROWS)
    noise = random.normal(size=(ROWS, CRITIC_UPDATES + 1, NOISE))
    return {
        "point": np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32),
        "noise": noise.astype(np.float32),
        "mix": random.uniform(size=(ROWS, CRITIC_UPDATES, 1)).astype(np.float32),
    }


def state():
    """Two two-layer networks, each with its optimizer state."""
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
        "bias": jnp.linspace(-2, 2, WIDTH),
        "out": jax.random.normal(last, (WIDTH, outputs)) / WIDTH**0.5,
    }


def apply(network, x):
    return jnp.tanh(x @ network["in"] + network["bias"]) @ network["out"]


def critic_loss(critic, batch, key):
    """Score of the fake minus that of the point, plus a penalty on slopes other than 1."""
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


def off_the_ring(state, batch, key):
    """Distance of each generated point from the ring."""
    points = apply(state["generator"], batch["noise"][:, -1])
    return jnp.abs(jnp.linalg.norm(points, axis=1) - 1)


class Distance(rx.Hook):
    """Track a moving average (about 50 steps) of the critic's distance, and the best evaluation."""

    def __init__(self):
        self.smooth, self.steps, self.nearest = 0.0, 0, None

    def step(self, run, step):
        self.steps += 1
        share = max(1 / self.steps, 0.02)
        self.smooth += share * (float(step.metrics["distance"]) - self.smooth)

    def figures(self, run, record):
        return {"smooth_distance": self.smooth}

    def evaluation(self, run, record):
        run.say(f"step {record.step} · {record.metrics['loss']:.3f} off the ring")
        self.nearest = min(self.nearest or [9.0], [record.metrics["loss"], record.step])

    def save_state(self):
        return [self.smooth, self.steps, self.nearest]

    def load_state(self, state):
        self.smooth, self.steps, self.nearest = state

    def summary(self):
        return ["near   {:.3f} off the ring at step {}".format(*self.nearest)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", help="folder to save the run in, and to resume it from")
    parser.add_argument("--steps", type=int, default=STEPS)
    flags = parser.parse_args()
    dp = rx.DataParallel(off_the_ring, step=step)
    trained = dp.init(state())
    with rx.Run(
        dp,
        trained,
        rows(),
        batch_size=BATCH,
        steps=flags.steps,
        eval_source=rx.Evaluation(rows(), every_epochs=None, every_steps=100),
        hooks=[Distance()],
        run_dir=flags.run_dir,
        saving=rx.Saving(every=25),
    ) as run:
        for batch in run:
            run.step(batch)


if __name__ == "__main__":
    main()
