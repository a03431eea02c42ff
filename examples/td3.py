"""TD3: two critics, a policy updated every second step, and target networks for all three.

The policy's sum over all rows is in one branch of a `jax.lax.cond` on `rx.step_number()`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, STATE, ACTION, WIDTH = 84, 32, 3, 2, 32
DISCOUNT, POLICY_EVERY, SHARE = 0.95, 2, 0.02
optimizer = optax.adam(3e-3)


def rows():
    """Transitions of a point pushed by actions, with noise for each row's next action."""
    random = np.random.default_rng(0)
    place, action = random.normal(size=(ROWS, STATE)), random.uniform(-1, 1, (ROWS, ACTION))
    following = 0.9 * place + action @ random.normal(size=(ACTION, STATE)) / 2
    far = np.sum(following**2, axis=1)
    found = {"state": place, "action": action, "next": following, "reward": -far, "done": far > 9}
    found["noise"] = np.clip(random.normal(size=(ROWS, ACTION)) / 5, -0.5, 0.5)
    return {name: leaf.astype(np.float32) for name, leaf in found.items()}


def state():
    """Three two-layer networks, their target networks, and the optimizer states."""
    first, second, last = jax.random.split(jax.random.key(0), 3)
    critics = [network(key, STATE + ACTION, 1) for key in (first, second)]
    networks = {"policy": network(last, STATE, ACTION), "critics": critics}
    moments = {name: optimizer.init(network) for name, network in networks.items()}
    return {"now": networks, "slow": networks, "moments": moments}


def network(key, inputs, outputs):
    sizes = (inputs, WIDTH), (WIDTH, outputs)
    keys = jax.random.split(key, len(sizes))
    return [jax.random.normal(each, size) / size[0] ** 0.5 for each, size in zip(keys, sizes)]


def apply(network, x):
    return jnp.tanh(x @ network[0]) @ network[1]


def values(critics, place, action):
    seen = jnp.concatenate([place, action], axis=1)
    return jnp.concatenate([apply(critic, seen) for critic in critics], axis=1)


def critic_loss(critics, batch, key):
    """Squared error of both critics to each row's target."""
    found = values(critics, batch["state"], batch["action"])
    return jnp.sum((found - batch["target"][:, None]) ** 2, axis=1)


def step(state, batch, key):
    now, slow, moments = state["now"], state["slow"], state["moments"]
    action = jnp.clip(jnp.tanh(apply(slow["policy"], batch["next"])) + batch["noise"], -1, 1)
    ahead = jnp.min(values(slow["critics"], batch["next"], action), axis=1)
    seen = {**batch, "target": batch["reward"] + DISCOUNT * (1 - batch["done"]) * ahead}
    means, gradient = rx.value_and_grad(critic_loss)(now["critics"], seen, key)
    updates, of_critics = optimizer.update(gradient, moments["critics"], now["critics"])
    critics = optax.apply_updates(now["critics"], updates)

    def policy_loss(policy, batch, key):
        return -values(critics, batch["state"], jnp.tanh(apply(policy, batch["state"])))[:, 0]

    def update_policy(policy, of_policy, slow):
        _, gradient = rx.value_and_grad(policy_loss)(policy, batch, key)
        updates, of_policy = optimizer.update(gradient, of_policy, policy)
        policy = optax.apply_updates(policy, updates)
        found = {"policy": policy, "critics": critics}
        return policy, of_policy, optax.incremental_update(found, slow, SHARE)

    begin = now["policy"], moments["policy"], slow
    turn = rx.step_number() % POLICY_EVERY == 0
    policy, of_policy, slow = jax.lax.cond(turn, update_policy, lambda *same: same, *begin)
    after = {"now": {"policy": policy, "critics": critics}, "slow": slow}
    return after | {"moments": {"policy": of_policy, "critics": of_critics}}, means


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(40):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
    print({name: round(float(value), 3) for name, value in metrics.items()})


if __name__ == "__main__":
    main()
