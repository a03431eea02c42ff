"""Double DQN with prioritised replay: the error of each row decides how often it is drawn again.

The step returns the errors by row (`rx.ByRow`), and the loop gives them to the replay.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, SIDE, ACTIONS, WIDTH, STEPS = 84, 32, 4, 4, 32, 600
DISCOUNT, SHARE, SHARPNESS, CORRECTION = 0.9, 0.02, 0.6, 0.4

optimizer = optax.adam(3e-3)


def rows():
    """Random moves on a square grid, with a reward for reaching its last corner."""
    random = np.random.default_rng(0)
    place, action = random.integers(SIDE, size=(ROWS, 2)), random.integers(ACTIONS, size=ROWS)
    move = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])[action]
    following = np.clip(place + move, 0, SIDE - 1)
    done = np.all(following == SIDE - 1, axis=1).astype(np.float32)
    seen, after = (np.eye(SIDE**2, dtype=np.float32)[x @ [SIDE, 1]] for x in (place, following))
    return {"place": seen, "action": action, "next": after, "reward": done, "done": done}


class Replay:
    """Rows that are drawn by their last errors, and weighted against this preference."""

    def __init__(self, rows):
        self.rows, self.error = rows, np.ones(len(rows["action"]))

    def draw(self, count, number):
        """Return the indices and the batch of step `number`."""
        chance = self.error**SHARPNESS / np.sum(self.error**SHARPNESS)
        index = np.random.default_rng(number).choice(len(chance), size=count, p=chance)
        weight = (len(chance) * chance[index]) ** -CORRECTION
        drawn = {name: leaf[index] for name, leaf in self.rows.items()}
        return index, {**drawn, "weight": (weight / weight.max()).astype(np.float32)}

    def learn(self, index, error):
        self.error[index] = np.abs(error) + 1e-3


def state():
    """A network of values, its slow copy, and its optimizer state."""
    first, last = jax.random.split(jax.random.key(0))
    model = {
        "in": jax.random.normal(first, (SIDE**2, WIDTH)),
        "out": jax.random.normal(last, (WIDTH, ACTIONS)) / WIDTH,
    }
    return {"model": model, "slow": model, "moments": optimizer.init(model)}


def values(model, place):
    return jnp.tanh(place @ model["in"]) @ model["out"]


def loss(model, batch, key):
    """Weighted squared error of each row; the error itself is returned by row."""
    found = jnp.take_along_axis(values(model, batch["place"]), batch["action"][:, None], axis=1)
    error = found[:, 0] - batch["target"]
    return batch["weight"] * error**2, {"error": rx.ByRow(error)}


def step(state, batch, key):
    best = jnp.argmax(values(state["model"], batch["next"]), axis=1)
    ahead = jnp.take_along_axis(values(state["slow"], batch["next"]), best[:, None], axis=1)[:, 0]
    seen = {**batch, "target": batch["reward"] + DISCOUNT * (1 - batch["done"]) * ahead}
    means, gradient, of_rows = rx.value_and_grad(loss, rows=True)(state["model"], seen, key)
    updates, moments = optimizer.update(gradient, state["moments"], state["model"])
    model = optax.apply_updates(state["model"], updates)
    slow = optax.incremental_update(model, state["slow"], SHARE)
    metrics = {**means, "ahead": rx.mean(ahead), "error": rx.ByRow(of_rows["error"])}
    return {"model": model, "slow": slow, "moments": moments}, metrics


def main():
    dp, replay = rx.DataParallel(step=step), Replay(rows())
    trained = dp.init(state())
    for number in range(STEPS):
        index, batch = replay.draw(BATCH, number)
        trained, metrics = dp.step(trained, batch)
        replay.learn(index, metrics["error"].whole())
    print(f"loss {metrics['loss']:.5f}, largest error {replay.error.max():.4f}")


if __name__ == "__main__":
    main()
