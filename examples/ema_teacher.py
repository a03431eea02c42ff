"""Self-distillation without labels: a student learns from a moving average of itself.

The teacher's outputs are centred by their moving mean over the rows of all devices: `rx.mean`.
`rx.Run` yields the batches, and a hook stops the run if the teacher collapses to one class.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, STEPS, INPUTS, WIDTH, CLASSES, VIEWS = 84, 32, 120, 8, 32, 6, 2
NOISE, SHARPNESS, TEACHER_SHARPNESS, SHARE, CENTRE_SHARE = 0.3, 5.0, 10.0, 0.02, 0.1

optimizer = optax.adamw(3e-3)


def rows():
    """Clustered points, and for each row the noise of its two views."""
    random = np.random.default_rng(0)
    places = random.normal(size=(CLASSES, INPUTS))
    points = places[random.integers(CLASSES, size=ROWS)] + random.normal(size=(ROWS, INPUTS)) / 4
    noise = random.normal(size=(ROWS, VIEWS, INPUTS))
    return {"point": points.astype(np.float32), "noise": noise.astype(np.float32)}


def state():
    """A two-layer student and teacher, the centre of outputs, and the optimizer state."""
    first, last = jax.random.split(jax.random.key(0))
    network = {
        "in": jax.random.normal(first, (INPUTS, WIDTH)) / INPUTS**0.5,
        "out": jax.random.normal(last, (WIDTH, CLASSES)) / WIDTH**0.5,
    }
    start = {"student": network, "teacher": network, "centre": jnp.zeros(CLASSES)}
    return start | {"moments": optimizer.init(network)}


def apply(network, x):
    found = jnp.tanh(x @ network["in"]) @ network["out"]
    return found / jnp.linalg.norm(found, axis=-1, keepdims=True)


def loss(student, batch, key):
    """Cross-entropy of the student on each view, with the teacher's output on the other view."""
    log_chances = jax.nn.log_softmax(SHARPNESS * apply(student, batch["views"]))
    return -jnp.mean(jnp.sum(batch["taught"] * log_chances, axis=2), axis=1)


def step(state, batch, key):
    views = batch["point"][:, None] + NOISE * batch["noise"]
    said = apply(state["teacher"], views)
    taught = jax.nn.softmax(TEACHER_SHARPNESS * (said - state["centre"]))
    seen = {"views": views, "taught": taught[:, ::-1]}
    means, gradient = rx.value_and_grad(loss)(state["student"], seen, key)
    updates, moments = optimizer.update(gradient, state["moments"], state["student"])
    student = optax.apply_updates(state["student"], updates)
    centre, shares = rx.mean((jnp.mean(said, axis=1), jnp.mean(taught, axis=1)))
    after = {
        "student": student,
        "teacher": optax.incremental_update(student, state["teacher"], SHARE),
        "centre": optax.incremental_update(centre, state["centre"], CENTRE_SHARE),
        "moments": moments,
    }
    return after, {**means, "largest": jnp.max(shares)}


def disagreement(state, batch, key):
    """Whether the teacher assigns the two views of a row to different classes."""
    views = batch["point"][:, None] + NOISE * batch["noise"]
    named = jnp.argmax(apply(state["teacher"], views), axis=-1)
    return jnp.float32(named[:, 0] != named[:, 1])


class Collapse(rx.Hook):
    """Stop the run if the teacher assigns nearly all rows to one class (moving average)."""

    def __init__(self, most=0.9, share=0.1):
        self.most, self.share, self.average = most, share, 0.0

    def step(self, run, step):
        self.average += self.share * (float(step.metrics["largest"]) - self.average)

    def figures(self, run, record):
        return {"collapse": self.average}

    def epoch(self, run, record):
        if self.average > self.most:
            run.stop(f"the teacher assigns {self.average:.0%} to one class")

    def save_state(self):
        return self.average

    def load_state(self, state):
        self.average = state

    def summary(self):
        return [f"class  {self.average:.3f} of all rows in the largest (moving average)"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", help="folder to save the run in, and to resume it from")
    parser.add_argument("--steps", type=int, default=STEPS)
    flags = parser.parse_args()
    dp = rx.DataParallel(disagreement, step=step)
    trained = dp.init(state())
    with rx.Run(
        dp,
        trained,
        rows(),
        batch_size=BATCH,
        steps=flags.steps,
        eval_source=rx.Evaluation(rows(), every_epochs=10),
        hooks=[Collapse()],
        run_dir=flags.run_dir,
        saving=rx.Saving(every=10),
    ) as run:
        for batch in run:
            run.step(batch)


if __name__ == "__main__":
    main()
