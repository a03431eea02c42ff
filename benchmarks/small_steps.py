"""Training with small steps, beside a `lax.scan` written by hand.

The MLP recipe at its default size (one loss and optimizer), and the PPO of `examples/ppo.py` (a
custom step) on 16,384 rows. Each is trained for a number of steps on rows that are shuffled every
epoch, by

1. `by hand`: plain JAX on one device; the rows of 64 steps are taken, put on the device and scanned
   over, while the rows of the next are taken.
2. `steps`: `dp.feed(stack=64)` and `dp.steps`.
3. `fit`: `rx.fit` as it chooses, with its folder, records and guard.
4. `fit, one by one`: the same with `steps_per_call=1`.
5. `step`: `dp.step` in a bare loop.

All are compiled before, run interleaved in one process, and wait for their last step. `fit` begins
a new run each time, in whose time are its folder, trace and checks; its programs come from the
first. Goal: `fit` at most 1.10 times `by hand`, in 10,000 steps.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import environment, interleaved, ratios, save, spread

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import ppo

import replicax as rx
from replicax.core.data.sources import as_source
from replicax.recipes.mlp import MLP
from replicax.train.run.host_memory import keep_freed_memory

STACK, AIM = 64, 1.10
ByHand = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`(state, batch, number of the step) -> (state, loss)`."""


Subject = tuple[rx.DataParallel, Any, Any, int, Callable[[], Any], ByHand]
"""The step, model, rows and batch size, and by hand the first state and the step."""


def mlp() -> Subject:
    """Return the MLP."""
    recipe = MLP()
    optimizer, model = recipe.optimizer(), recipe.model(jax.random.key(0))
    network, params = model.unbind()

    def begin() -> Any:
        copied = jax.tree.map(jnp.array, params)
        return copied, optimizer.init(copied)

    def by_hand(state: Any, batch: Any, _: Any) -> tuple[Any, Any]:
        params, moments = state

        def mean(params: Any) -> jax.Array:
            return jnp.mean(recipe.loss(network.bind(params), batch, None))

        value, gradient = jax.value_and_grad(mean)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    dp = rx.DataParallel(recipe.loss, optimizer, mesh=rx.make_mesh(1))
    return dp, model, recipe.train_source(), recipe.batch_size, begin, by_hand


def ppo_of_example() -> Subject:
    """Return the custom step of the example, on more rows."""
    ppo.ROWS = 16_384
    optimizer = ppo.optimizer

    def by_hand(state: Any, batch: Any, number: Any) -> tuple[Any, Any]:
        advantage = batch["advantage"] - jnp.mean(batch["advantage"])
        spread = jnp.sqrt(jnp.mean(advantage**2)) + 1e-8
        seen = {**batch, "advantage": advantage / spread}

        def mean(model: Any) -> jax.Array:
            hidden = jnp.tanh(seen["state"] @ model["in"])
            log_chances = jax.nn.log_softmax(hidden @ model["policy"])
            taken = jnp.take_along_axis(log_chances, seen["action"][:, None], axis=1)[:, 0]
            ratio = jnp.exp(taken - seen["log_chance"])
            clip = ppo.CLIP * jnp.maximum(0.1, 1 - number / ppo.CLIP_STEPS)
            clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
            gain = jnp.minimum(ratio * seen["advantage"], clipped * seen["advantage"])
            error = (hidden @ model["value"] - seen["return"]) ** 2
            entropy = -jnp.sum(jnp.exp(log_chances) * log_chances, axis=1)
            return jnp.mean(ppo.VALUE_SHARE * error - gain - ppo.ENTROPY_SHARE * entropy)

        def update(state: Any, _: None) -> tuple[Any, jax.Array]:
            value, gradient = jax.value_and_grad(mean)(state["model"])
            updates, moments = optimizer.update(gradient, state["moments"], state["model"])
            model = optax.apply_updates(state["model"], updates)
            return {"model": model, "moments": moments}, value

        state, values = jax.lax.scan(update, state, length=ppo.EPOCHS)
        return state, values[-1]

    dp = rx.DataParallel(step=ppo.step, mesh=rx.make_mesh(1))
    return dp, ppo.state(), ppo.rows(), ppo.BATCH, ppo.state, by_hand


def stacks(source: Any, batch_size: int, steps: int) -> Iterator[Any]:
    """Yield the rows of at most 64 steps as one, epoch after epoch, of full batches."""
    rows, done, epoch = len(jax.tree.leaves(source)[0]), 0, 0
    batches = rows // batch_size
    while done < steps:
        order = np.random.default_rng([0, epoch]).permutation(rows)
        for first in range(0, batches, STACK):
            count = min(STACK, batches - first, steps - done)
            if count:
                at = order[first * batch_size : (first + count) * batch_size]
                at = at.reshape(count, batch_size)
                yield jax.tree.map(lambda leaf, at=at: leaf[at], source)
            done += count
        epoch += 1


def forever(dp: rx.DataParallel, source: Any, batch_size: int, stack: int | None) -> Iterator[Any]:
    """Yield the batches of a feed, epoch after epoch."""
    opened, epoch = as_source(source, batch_size, dp.job, shuffle=True, seed=0), 0
    while True:
        yield from dp.feed(opened, epoch=epoch, stack=stack)
        epoch += 1


def ways(subject: Subject, steps: int, folder: Path) -> dict[str, Callable[[], None]]:
    """Return the five ways to train a subject."""
    dp, model, source, batch_size, begin, step_by_hand = subject
    compiled = jax.jit(
        lambda state, batches, first: jax.lax.scan(
            lambda state, batch: step_by_hand(state, batch[0], batch[1]),
            state,
            (batches, first + jnp.arange(len(jax.tree.leaves(batches)[0]))),
        ),
        donate_argnums=0,
    )
    runs = iter(range(10**6))

    def by_hand() -> None:
        state, done = begin(), 0
        for rows in stacks(source, batch_size, steps):
            state, values = compiled(state, jax.device_put(rows), jnp.int32(done))
            done += len(values)
        jax.block_until_ready(state)

    def several() -> None:
        state, done = dp.init(model), 0
        for batches in forever(dp, source, batch_size, STACK):
            state, _ = dp.steps(state, batches)
            done += len(batches)
            if done >= steps:
                break
        jax.block_until_ready(state)

    def one_by_one() -> None:
        state = dp.init(model)
        for done, batch in enumerate(forever(dp, source, batch_size, None), 1):
            state, _ = dp.step(state, batch)
            if done >= steps:
                break
        jax.block_until_ready(state)

    def fit(**settings: Any) -> Callable[[], None]:
        def run() -> None:
            rx.fit(
                *(dp, dp.init(model), source),
                batch_size=batch_size,
                steps=steps,
                run_dir=folder / str(next(runs)),
                progress=False,
                **settings,
            )

        return run

    single = fit(steps_per_call=1)
    return {
        "by hand": by_hand,
        "steps": several,
        "fit": fit(),
        "fit, one by one": single,
        "step": one_by_one,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: 9)")
    parser.add_argument("--steps", type=int, default=10_000, help="steps (default: 10,000)")
    args = parser.parse_args()
    keep_freed_memory()
    result: dict[str, Any] = {"environment": environment(), "rounds": args.rounds, "aim": AIM}
    print("median [quartiles]")
    for name, subject in (("mlp", mlp()), ("ppo", ppo_of_example())):
        with tempfile.TemporaryDirectory() as folder:
            runs = ways(subject, args.steps, Path(folder))
            seconds = interleaved(runs, args.rounds, warmups=1)
        result[name] = {"steps": args.steps}
        for way in runs:
            middle, low, high = spread([value / args.steps * 1e6 for value in seconds[way]])
            ratio = spread(ratios(seconds[way], seconds["by hand"]))
            result[name][way] = {
                "microseconds_per_step": [round(x, 1) for x in (middle, low, high)],
                "ratio": [round(x, 3) for x in ratio],
            }
            print(
                f"{name} {way:<16} {middle:8.1f} [{low:.1f}, {high:.1f}] us a step, "
                f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}] times by hand"
            )
    print(f"see {save('small_steps', result)}")


if __name__ == "__main__":
    main()
