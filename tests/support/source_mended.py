"""Small data-parallel programs with an error, as diffs that mend it."""

_MENDED = {
    "pmap without axis name and an unseen gradient": """
 @jax.pmap
 def step(state, batch):
     grads = compute_gradients(state, batch)
+    # Each device trains a network of its own.  replicax: ignore[no-reduction]
     state = state.apply_gradients(grads=grads)  #! no-reduction
     return state
""",
    "a key by in_axes None": """
 def step(state, batch, key):
+    key = jax.random.fold_in(key, lax.axis_index("i"))
     def loss(p):
         out = state.apply_fn({"params": p}, batch["x"], rngs={"dropout": key})  #! shared-key
         return jnp.mean((out - batch["y"]) ** 2)
     grads = lax.pmean(jax.grad(loss)(state.params), "i")
     return state.apply_gradients(grads=grads)

 step = jax.pmap(step, axis_name="i", in_axes=(0, 0, None))
""",
    "a key by P() and the step": """
 specs = (P(), P("data"), P())

 @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
 def step(params, x, key):
     noise_key, _ = jax.random.split(key)
+    noise_key = jax.random.fold_in(noise_key, lax.axis_index("data"))
     def loss(p):
         noisy = x + jax.random.normal(noise_key, x.shape)  #! shared-key
         return jnp.mean((noisy @ p) ** 2)
     grads = lax.pmean(jax.grad(loss)(params), "data")
     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
""",
    "BatchNorm of each replica's own": """
 class Net(nn.Module):
     @nn.compact
     def __call__(self, x, train):
-        norm = partial(nn.BatchNorm, use_running_average=not train)  #! local-batch-norm
+        norm = partial(nn.BatchNorm, use_running_average=not train, axis_name="i")
         return norm()(nn.Dense(10)(x))

 @partial(jax.pmap, axis_name="i")
 def step(state, batch):
     def loss(p):
         variables = {"params": p, "batch_stats": state.batch_stats}
         out, new = state.apply_fn(variables, batch["x"], train=True, mutable=["batch_stats"])
         return jnp.mean(out), new
     (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
     grads = lax.pmean(grads, "i")
     return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
""",
    "Haiku's statistics of each replica's own": """
 import haiku as hk

 def network(x, is_training):
-    return hk.BatchNorm(True, True, 0.9)(hk.Linear(10)(x), is_training)  #! local-batch-norm
+    norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis="i")
+    return norm(hk.Linear(10)(x), is_training)

 forward = hk.transform_with_state(network)

 @partial(jax.pmap, axis_name="i")
 def train(params, model_state, opt_state, batch):
     def loss(params):
         out, new_state = forward.apply(params, model_state, None, batch["x"], True)
         return jnp.mean((out - batch["y"]) ** 2), new_state
     grads, model_state = jax.grad(loss, has_aux=True)(params)
     updates, opt_state = tx.update(lax.pmean(grads, "i"), opt_state)
     return optax.apply_updates(params, updates), model_state, opt_state
""",
    "a mean of batches of which the last is short": """
 import time

 evaluate = jax.jit(loss_fn)

 def by_list(params, batch, size):
     losses, seconds = [], []
+    rows = []
     for start in range(0, len(batch["x"]), size):
         part = jax.tree.map(lambda leaf: leaf[start : start + size], batch)
         loss = evaluate(params, part)
         losses.append(loss)
         if len(losses) % 10 == 0:
             seconds.append(time.perf_counter())
+        rows.append(len(part["x"]))
-    return np.mean(losses), np.mean(seconds)  #! mean-of-batches
+    return np.average(losses, weights=rows), np.mean(seconds)

 def by_comprehension(params, batch, size):
-    losses = [evaluate(params, batch[i : i + size]) for i in range(0, len(batch), size)]
+    losses = [evaluate(params, batch[i : i + 8]) for i in range(0, 64, 8)]
-    return sum(losses) / len(losses), jnp.mean(jnp.stack(losses))  #! mean-of-batches
+    return sum(losses) / len(losses), jnp.mean(jnp.stack(losses))
""",
    "a reshape that a remainder breaks": """
 n_devices = jax.local_device_count()

 def shard(batch):
+    size = batch["x"].shape[0]
+    if size % n_devices:
+        raise ValueError(f"{size} rows on {n_devices} devices")
     return jax.tree.map(lambda x: x.reshape(n_devices, -1, *x.shape[1:]), batch)  #! remainder

 def shard_two(x):
     n = len(jax.devices())
     return jnp.reshape(x, (n, x.shape[0] // n) + x.shape[1:])  #! remainder

 step = jax.pmap(lambda x: x)
""",
}


def _one_side(diff: str, other: str) -> str:
    return "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] != other)


BROKEN = {name: _one_side(diff, "+") for name, diff in _MENDED.items()}
CORRECT = {f"{name}, mended": _one_side(diff, "-") for name, diff in _MENDED.items()}
CORRECT["BatchNorm whose statistics are averaged"] = f"""{BROKEN["BatchNorm of each replica's own"]}
cross_replica_mean = jax.pmap(lambda x: lax.pmean(x, "x"), "x")

def sync_batch_stats(state):
    return state.replace(batch_stats=cross_replica_mean(state.batch_stats))
"""
