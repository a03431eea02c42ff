"""Small data-parallel programs, each with an error.

A line that ends with `#! rule` is one where that rule must speak; everywhere else none may.
"""

BROKEN = {
    "pmap without pmean": """
@partial(jax.pmap, axis_name="i")
def step(state, batch):
    grads = jax.grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads)  #! no-reduction
""",
    "only the loss is reduced": """
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    loss = lax.pmean(loss, "i")
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)  #! no-reduction
    return params, opt_state, loss

p_step = jax.pmap(step, axis_name="i")
""",
    "written out SGD": """
def step(params, x, y):
    def loss(p):
        return jnp.mean((x @ p - y) ** 2)
    g = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, g)  #! no-reduction

step = jax.pmap(step, axis_name="i", in_axes=(None, 0, 0))
""",
    "a gradient of a helper that forgets": """
def gradients(params, batch):
    (loss, aux), grads = jax.value_and_grad(lambda p: (loss_fn(p, batch), 1), has_aux=True)(params)
    return loss, grads

def make():
    def step(state, batch):
        loss, grads = gradients(state.params, batch)
        state = state.apply_gradients(grads=grads)  #! no-reduction
        return state, lax.pmean(loss, "i")
    return jax.pmap(step, "i")

step = make()
""",
    "nnx without pmean": """
@nnx.pmap(axis_name="data", in_axes=(None, 0), out_axes=None)
def step(optimizer, batch):
    def loss(model):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()
    value, grads = nnx.value_and_grad(loss)(optimizer.model)
    optimizer.update(grads)  #! no-reduction
    return lax.pmean(value, "data")
""",
    "shard_map unchecked without pmean": """
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
def step(params, batch):
    grads = jax.grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)  #! no-reduction
""",
    "masked mean per device": """
@partial(jax.pmap, axis_name="devices")
def step(state, batch):
    def masked(params):
        rows = (batch["x"] @ params - batch["y"]) ** 2
        return (rows * batch["mask"]).sum() / batch["mask"].sum()  #! mean-of-means
    loss, grads = jax.value_and_grad(masked)(state.params)
    grads = jax.lax.pmean(grads, axis_name="devices")
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, axis_name="devices")
""",
    "masked mean, guarded, of a mask made of labels": """
def masked(params, batch):
    per_row = optax.squared_error(batch["x"] @ params, batch["y"])
    valid = batch["y"] >= 0
    total = jnp.sum(jnp.where(valid, per_row, 0.0))
    return total / jnp.maximum(jnp.sum(valid), 1)  #! mean-of-means

@partial(jax.pmap, axis_name="i")
def step(state, batch):
    grads = lax.pmean(jax.grad(masked)(state.params, batch), "i")
    return state.apply_gradients(grads=grads)
""",
    "a key from a constant": """
@partial(jax.pmap, axis_name="i")
def step(state, batch):
    key = jax.random.PRNGKey(0)
    noise = jax.random.normal(key, batch["x"].shape)  #! shared-key
    def loss(p):
        return jnp.mean(((batch["x"] + noise) @ p) ** 2)
    grads = lax.pmean(jax.grad(loss)(state.params), "i")
    return state.apply_gradients(grads=grads)
""",
    "masks by rank beside stacked layers": """
from optax.contrib import muon

def network(params, x):
    return lax.scan(lambda x, own: (x @ own["w"] + own["b"], None), x, params["layers"])[0]

def decays(params):
    return jax.tree.map(lambda leaf: len(leaf.shape) > 1, params)

plain = optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))  #! rank-rule
named = optax.adamw(0.1, mask=decays)  #! rank-rule
hidden = muon(0.1)  #! rank-rule
declared = muon(0.1, muon_weight_dimension_numbers=dims)
by_name = optax.adamw(0.1, mask=lambda params: {name: name != "b" for name in params})
""",
    "compiled at every turn": """
def train(params, loader):
    for batch in loader:
        step = jax.jit(lambda p: jax.grad(loss_fn)(p, batch))  #! compiled-in-loop
        grads = step(params)
        params = jax.pmap(partial(jnp.add, 1))(params)  #! compiled-in-loop
    while params:
        f = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P(), out_specs=P())  #! compiled-in-loop
        params = f(params)
""",
    "a weight that anneals outside of a compiled loss": """
import replicax as rx

beta = 0.0

def loss(params, batch, key):
    return batch["x"] @ params["w"] + beta * (params["w"] ** 2).sum()

dp = rx.DataParallel(loss, tx)
state = dp.init({"w": jnp.zeros(3)})
for batch in batches:
    state, metrics = dp.step(state, batch)
    beta += 0.1  #! frozen-value
""",
    "a learning rate of the surroundings": """
def train(params, batches):
    rate = 0.1

    @jax.jit
    def update(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    for epoch in range(10):
        rate = 0.1 / (1 + epoch)  #! frozen-value
        for batch in batches:
            params = update(params, batch)
    return params
""",
    "a clip range that a loop gives": """
def surrogate(params, batch):
    ratio = jnp.exp(batch["x"] @ params["w"])
    return jnp.clip(ratio, 1 - clip, 1 + clip).mean()

fast = jax.jit(surrogate)
for clip in (0.2, 0.1):  #! frozen-value
    fast({"w": jnp.zeros(3)}, batch)
""",
    "a scale that is changed between two calls": """
scale = 1.0

@partial(jax.jit, static_argnums=1)
def scaled(x, axis):
    return scale * x.sum(axis)

first = scaled(data, 0)
scale = 2.0  #! frozen-value
second = scaled(data, 0)
""",
    "calls that fail": """
from jax.experimental import shard_map
f = shard_map(jnp.sum, mesh=mesh, in_specs=P("data"), out_specs=P("data"))  #! bad-call
split = P("data")
f = jax.shard_map(jnp.sum, mesh=mesh, in_specs=split, check_rep=False)  #! bad-call
optimizer = nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx)  #! bad-call
spec = jax.make_mesh((8,))  #! bad-call
whole = NamedSharding(mesh)  #! bad-call
smooth = partial(jnp.sum, axes=0)  #! bad-call
""",
    "a key that replicate gives to all devices": """
from flax import jax_utils

def step(state, batch, key):
    key = jax.random.fold_in(key, state.step)
    def loss(p):
        return (state.apply_fn({"params": p}, batch["x"], rngs={"dropout": key}) ** 2).mean()
    grads = lax.pmean(jax.grad(loss)(state.params), "i")
    return state.apply_gradients(grads=grads)

p_step = jax.pmap(step, axis_name="i")
keys = jax_utils.replicate(jax.random.key(0))  #! shared-key
""",
    "a scale of each replica's own": """
from flax.training.dynamic_scale import DynamicScale

def step(state, dynamic_scale, batch):
    grad_fn = dynamic_scale.value_and_grad(lambda p: loss_fn(p, batch))  #! local-scale
    dynamic_scale, finite, loss, grads = grad_fn(state.params)
    grads = lax.pmean(grads, "i")
    return state.apply_gradients(grads=grads), dynamic_scale

p_step = jax.pmap(step, axis_name="i")
""",
    "masked means that go into an empty dict and a list": """
def losses_of(params, batch, names):
    losses, stats = {}, []
    rows = (batch["x"] @ params - batch["y"]) ** 2
    count = batch["mask"].sum()
    for name in names:
        losses[name] = (rows * batch["mask"]).sum() / count  #! mean-of-means
        stats.append(jnp.sum(rows * batch["mask"]) / jnp.sum(batch["mask"]))  #! mean-of-means
    return sum(losses.values()), stats

def step(state, batch):
    grads, stats = jax.grad(losses_of, has_aux=True)(state.params, batch, ["data"])
    return state.apply_gradients(grads=lax.pmean(grads, "i")), lax.pmean(stats, "i")

p_step = jax.pmap(step, axis_name="i")
""",
    "a key in a trainer that is replicated": """
import flax

class Trainer(flax.struct.PyTreeNode):
    rng: jax.Array
    params: jax.Array

    @partial(jax.pmap, axis_name="data")
    def update(self, images):
        rng, noise_key = jax.random.split(self.rng)
        def loss(params):
            return jnp.mean((images + jax.random.normal(noise_key, images.shape)) @ params)
        grads = lax.pmean(jax.grad(loss)(self.params), "data")
        return self.replace(rng=rng, params=self.params - 0.1 * grads)

trainer = Trainer(jax.random.key(0), params)
trainer = flax.jax_utils.replicate(trainer, devices=jax.local_devices())  #! shared-key
for images in batches:
    trainer = trainer.update(images)
""",
    "a key in a state that is replicated": """
from flax import jax_utils

def step(state, x):
    key = jax.random.fold_in(state.dropout_key, state.step)
    def loss(p):
        return (state.apply_fn({"params": p}, x, rngs={"dropout": key}) ** 2).mean()
    return state.apply_gradients(grads=lax.pmean(jax.grad(loss)(state.params), "i"))

p_step = jax.pmap(step, axis_name="i")
copies = jax_utils.replicate(state)  #! shared-key
for x in batches:
    copies = p_step(copies, x)
""",
    "a scale of each replica's own, in a step that another file maps": """
def step(state, batch):
    scale = state.dynamic_scale
    if scale:
        grad_fn = scale.value_and_grad(lambda p: loss_fn(p, batch))  #! local-scale
        scale, finite, loss, grads = grad_fn(state.params)
    else:
        grads = lax.pmean(jax.grad(loss_fn)(state.params, batch), axis_name="batch")
    return state.apply_gradients(grads=grads, dynamic_scale=scale)
""",
    "what JAX no longer has": """
import flax.optim  #! removed-api
import jax.lib.xla_bridge  #! removed-api
from jax.core import axis_frame  #! removed-api
from jax.experimental import maps  #! removed-api
from jax.sharding import PmapSharding  #! removed-api

params = jax.device_put_replicated({}, jax.devices())  #! removed-api
batch = jax.device_put_sharded([], jax.devices())  #! removed-api
leaves = jax.tree_map(lambda x: x, params)  #! removed-api
tree = jax.tree_structure(params)  #! removed-api
decay = optax.additive_weight_decay(0.1)  #! removed-api
first = jax.process_indexs() == 0  #! removed-api
""",
    "metrics fetched every step, and now and then": """
@partial(jax.pmap, axis_name="i", out_axes=(0, None))
def step(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return optax.apply_updates(params, lax.pmean(grads, "i")), lax.pmean(loss, "i")

def train(params, loader):
    losses = []
    for number, batch in enumerate(loader):
        params, loss = step(params, batch)
        losses.append(float(loss))  #! fetched-every-step
        print(f"step {number}: {loss:.3f}")  #! fetched-every-step
    for batch in loader:
        params, loss = step(params, batch)
        losses.append(loss.item())  #! fetched-every-step
        losses.append(np.asarray(loss))  #! fetched-every-step
        losses += [jax.device_get(loss)]  #! fetched-every-step

def log(number, loss):
    if number % 10 == 0:
        print(number, float(loss))

def train_quietly(params, loader):
    for epoch in range(100):
        losses = []
        for number, batch in enumerate(loader):
            params, loss = step(params, batch)
            losses.append(loss)
            log(number, loss)
            if number % 50:
                continue
            print(loss)
        print(epoch, float(loss), np.mean(jax.device_get(losses)), loss.shape)
    for _ in range(3):
        params, loss = step(params, batch)
        print(loss)
    for batch in loader:
        params, loss = step(params, batch)
        jax.block_until_ready(loss)
""",
    "masked metrics, in several forms": """
@partial(jax.pmap, axis_name="i")
def evaluate(params, batch):
    right = (jnp.argmax(batch["x"] @ params, -1) == batch["y"]) * batch["mask"]
    accuracy = right.sum() / (batch["mask"].sum() + 1e-8)  #! mean-of-means
    return lax.pmean({"accuracy": accuracy}, "i")

@partial(jax.pmap, axis_name="i")
def weigh(params, batch):
    loss = (batch["x"] @ params) ** 2
    one = jnp.mean(loss, where=batch["mask"])  #! mean-of-means
    two = jnp.average(loss, weights=batch["weights"])  #! mean-of-means
    return lax.pmean((one, two), "i")

def compute(params, batch):
    rows = (batch["x"] @ params - batch["y"]) ** 2
    metrics = {"loss": jnp.sum(rows * batch["mask"]) / jnp.sum(batch["mask"])}  #! mean-of-means
    return lax.pmean(metrics, axis_name="batch")

p_compute = jax.pmap(compute, axis_name="batch")
""",
}
