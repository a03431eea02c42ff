"""PPO: several updates on each batch, with advantages normalised over the rows of all devices.

Two calls of `rx.mean` in the step compute their mean and variance, excluding padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, STATE, ACTIONS, WIDTH = 84, 32, 4, 3, 32
EPOCHS, CLIP, CLIP_STEPS, VALUE_SHARE, ENTROPY_SHARE = 4, 0.2, 120, 0.5, 0.01

optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))


def rows():
    """Uniformly random actions in random states, and their returns."""
    random = np.random.default_rng(0)
    place, action = random.normal(size=(ROWS, STATE)), random.integers(ACTIONS, size=ROWS)
    worth = place @ random.normal(size=(STATE, ACTIONS))
    found = {"state": place, "return": worth[np.arange(ROWS), action] + 2}
    found["advantage"] = found["return"] - worth.mean(axis=1)
    found["log_chance"] = np.full(ROWS, -np.log(ACTIONS))
    return {"action": action} | {name: leaf.astype(np.float32) for name, leaf in found.items()}


def state():
    """A network with two heads, initially with a uniform policy, and its optimizer state."""
    inner, value = jax.random.split(jax.random.key(0))
    model = {
        "in": jax.random.normal(inner, (STATE, WIDTH)) / STATE**0.5,
        "value": jax.random.normal(value, (WIDTH,)) / WIDTH**0.5,
        "policy": jnp.zeros((WIDTH, ACTIONS)),
    }
    return {"model": model, "moments": optimizer.init(model)}


def loss(model, batch, key):
    """The clipped objective, value error and entropy of each row."""
    hidden = jnp.tanh(batch["state"] @ model["in"])
    log_chances = jax.nn.log_softmax(hidden @ model["policy"])
    taken = jnp.take_along_axis(log_chances, batch["action"][:, None], axis=1)[:, 0]
    change = taken - batch["log_chance"]
    clip = CLIP * jnp.maximum(0.1, 1 - rx.step_number() / CLIP_STEPS)
    clipped = jnp.clip(jnp.exp(change), 1 - clip, 1 + clip)
    gain = jnp.minimum(jnp.exp(change) * batch["advantage"], clipped * batch["advantage"])
    error = (hidden @ model["value"] - batch["return"]) ** 2
    entropy = -jnp.sum(jnp.exp(log_chances) * log_chances, axis=1)
    found = {"gain": gain, "error": error, "entropy": entropy}
    return VALUE_SHARE * error - gain - ENTROPY_SHARE * entropy, found


def step(state, batch, key):
    advantage = batch["advantage"] - rx.mean(batch["advantage"])
    spread = jnp.sqrt(rx.mean(advantage**2)) + 1e-8
    seen = {**batch, "advantage": advantage / spread}

    def update(state, _):
        means, gradient = rx.value_and_grad(loss)(state["model"], seen, key)
        updates, moments = optimizer.update(gradient, state["moments"], state["model"])
        model = optax.apply_updates(state["model"], updates)
        return {"model": model, "moments": moments}, means

    state, means = jax.lax.scan(update, state, length=EPOCHS)
    return state, jax.tree.map(lambda of_epochs: of_epochs[-1], means)


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(40):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
    print({name: round(float(value), 3) for name, value in metrics.items()})


if __name__ == "__main__":
    main()
