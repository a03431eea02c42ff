"""GRPO: a policy answers each prompt several times, and learns from its better answers.

A row is a prompt with its group of answers, so advantages need no rows of other devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, WORDS, LENGTH, WIDTH, GROUP = 84, 32, 5, 4, 32, 8
UPDATES, CLIP, DIVERGENCE_SHARE = 2, 0.2, 0.01

optimizer = optax.adam(3e-3)


def rows():
    """Random prompts, and the number of each row."""
    prompt = np.random.default_rng(0).integers(WORDS, size=(ROWS, LENGTH))
    return {"prompt": prompt, "row": np.arange(ROWS)}


def state():
    """A policy, the reference that it stays close to, and its optimizer state."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "prompt": jax.random.normal(keys[0], (LENGTH, LENGTH, WORDS, WIDTH)) / LENGTH,
        "before": jax.random.normal(keys[1], (WORDS + 1, WIDTH)) / 3,
        "out": jax.random.normal(keys[2], (WIDTH, WORDS)) / WIDTH**0.5,
    }
    return {"model": model, "reference": model, "moments": optimizer.init(model)}


def log_chances(model, prompt, place, before):
    """Return those of all words at `place` of the answer, after the word `before`."""
    hidden = jnp.sum(model["prompt"][place, jnp.arange(LENGTH), prompt], axis=0)
    return jax.nn.log_softmax(jnp.tanh(hidden + model["before"][before]) @ model["out"])


def answers(model, prompt, key):
    """Draw a group of answers to one prompt, `[GROUP, LENGTH]`."""

    def answer(key):
        def word(before, drawn):
            place, key = drawn
            found = jax.random.categorical(key, log_chances(model, prompt, place, before))
            return found, found

        keys = jax.random.split(key, LENGTH)
        return jax.lax.scan(word, jnp.int32(WORDS), (jnp.arange(LENGTH), keys))[1]

    return jax.vmap(answer)(jax.random.split(key, GROUP))


def reward(prompt, answer):
    """Return the share of words in `answer` that repeat the prompt backwards."""
    return jnp.mean(answer == prompt[::-1], axis=-1)


def of_words(model, batch):
    """Return the log probability of each word that was drawn, `[rows, GROUP, LENGTH]`."""

    def of_answer(prompt, answer):
        before = jnp.concatenate([jnp.array([WORDS]), answer[:-1]])
        over = jax.vmap(log_chances, (None, None, 0, 0))(model, prompt, jnp.arange(LENGTH), before)
        return jnp.take_along_axis(over, answer[:, None], axis=1)[:, 0]

    return jax.vmap(jax.vmap(of_answer, (None, 0)))(batch["prompt"], batch["answer"])


def loss(model, batch, key):
    """The clipped objective of each word, and its divergence from the reference."""
    now = of_words(model, batch)
    ratio, advantage = jnp.exp(now - batch["old"]), batch["advantage"][..., None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    away = batch["reference"] - now
    divergence = jnp.exp(away) - away - 1
    return DIVERGENCE_SHARE * divergence - gain, {"divergence": divergence}


def step(state, batch, key):
    of_step = jax.random.fold_in(jax.random.key(1), rx.step_number())
    keys = jax.vmap(jax.random.fold_in, (None, 0))(of_step, batch["row"])
    answer = jax.vmap(answers, (None, 0, 0))(state["model"], batch["prompt"], keys)
    rewards = jax.vmap(reward)(batch["prompt"], answer)
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    advantage = centred / (jnp.std(rewards, axis=1, keepdims=True) + 1e-4)
    seen = {"prompt": batch["prompt"], "answer": answer, "advantage": advantage}
    seen["old"], seen["reference"] = (
        of_words(state[name], seen) for name in ("model", "reference")
    )

    def update(carry, _):
        model, moments = carry
        means, gradient = rx.value_and_grad(loss)(model, seen, key)
        updates, moments = optimizer.update(gradient, moments, model)
        return (optax.apply_updates(model, updates), moments), means

    begin = state["model"], state["moments"]
    (model, moments), means = jax.lax.scan(update, begin, length=UPDATES)
    after = {"model": model, "reference": state["reference"], "moments": moments}
    means = jax.tree.map(lambda of_updates: of_updates[-1], means)
    return after, {**means, "reward": rx.mean(jnp.mean(rewards, axis=1))}


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(40):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
    print({name: round(float(value), 3) for name, value in metrics.items()})


if __name__ == "__main__":
    main()
