"""Small data-parallel programs without an error, in many spellings."""

CORRECT = {
    "masks by rank beside a scan over batches": """
optimizer = optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))

def epoch(state, batches):
    return lax.scan(lambda state, batch: (state, loss_fn(state[0], batch)), state, batches)
""",
    "pmap with pmean, every spelling": """
from jax.lax import pmean as pm
import jax.lax

@functools.partial(jax.pmap, axis_name="i", donate_argnums=0)
def one(state, batch):
    with_aux = lambda p: (loss_fn(p, batch), {})
    (loss, aux), grads = jax.value_and_grad(with_aux, has_aux=True)(state.params)
    grads, loss = pm((grads, loss), axis_name="i")
    return state.apply_gradients(grads=grads), loss

def two(params, opt_state, batch):
    grads = jax.tree.map(lambda g: lax.pmean(g, "i"), jax.grad(loss_fn)(params, batch))
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

two = jax.pmap(two, "i")

def average(tree):
    return jax.tree_util.tree_map(partial(pm, axis_name="i"), tree)

class Trainer:
    def __init__(self):
        self.step = jax.pmap(self._step, axis_name="i")

    def _step(self, state, batch):
        grads = jax.grad(self._loss)(state.params, batch)
        state = state.apply_gradients(grads=average(grads))
        return state

    def _loss(self, params, batch):
        return loss_fn(params, batch)
""",
    "reduced by a class of the file": """
class State(TrainState):
    def apply_gradients(self, *, grads):
        grads = lax.pmean(grads, "i")
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        return self.replace(params=optax.apply_updates(self.params, updates), opt_state=opt_state)

@partial(jax.pmap, axis_name="i")
def step(state: State, batch):
    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch))

state = State(params, opt_state, tx=tx)
""",
    "reduced by a function that cannot be seen": """
from utils import sync

@partial(jax.pmap, axis_name="i")
def step(state, batch):
    grads = sync(jax.grad(loss_fn)(state.params, batch))
    return state.apply_gradients(grads=grads)
""",
    "reduced where a flag says so": """
def make(distributed):
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        if distributed:
            grads = lax.pmean(grads, axis_name="i")
        return state.apply_gradients(grads=grads), loss
    return jax.pmap(step, axis_name="i") if distributed else jax.jit(step)

step = make(True)
""",
    "gradients summed, divided by the count": """
def total(params, batch):
    return ((batch["x"] @ params - batch["y"]) ** 2 * batch["mask"]).sum()

@partial(jax.pmap, axis_name="i")
def step(state, batch):
    loss, grads = jax.value_and_grad(total)(state.params, batch)
    count = lax.psum(batch["mask"].sum(), "i")
    grads = jax.tree.map(lambda g: lax.psum(g, "i") / count, grads)
    return state.apply_gradients(grads=grads), lax.psum(loss, "i") / count

@partial(jax.pmap, axis_name="i")
def step_two(state, batch):
    n = lax.psum(1, "i")
    grads = lax.psum(jax.grad(loss_fn)(state.params, batch), "i")
    grads = jax.tree.map(lambda g: g / n, grads)
    return state.apply_gradients(grads=grads)

@partial(jax.pmap, axis_name="i")
def step_three(state, batch):
    count = lax.psum(batch["mask"].sum(), "i")
    grads = jax.grad(lambda p: total(p, batch) / count)(state.params)
    return state.apply_gradients(grads=lax.psum(grads, "i"))

@partial(jax.pmap, axis_name="i")
def step_four(state, batch):
    grads = jax.grad(lambda p: loss_fn(p, batch) / jax.device_count())(state.params)
    return state.apply_gradients(grads=lax.psum(grads, "i"))
""",
    "parameters averaged after local steps": """
@partial(jax.pmap, axis_name="i")
def local_sgd(params, batches):
    def one(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None
    params, _ = lax.scan(one, params, batches)
    return lax.pmean(params, "i")
""",
    "an attack on the inputs and an inner loop": """
@partial(jax.pmap, axis_name="i")
def attack(params, x, y):
    g = jax.grad(lambda x: jnp.mean((x @ params - y) ** 2))(x)
    return x - 0.1 * jnp.sign(g)

@partial(jax.pmap, axis_name="i")
def meta(state, batch):
    def outer(params):
        inner = jax.grad(loss_fn)(params, batch)
        fast = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
        return loss_fn(fast, batch)
    grads = lax.pmean(jax.grad(outer)(state.params), "i")
    return state.apply_gradients(grads=grads)
""",
    "shard_map, unchecked and checked": """
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False)
def one(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    grads, loss = lax.pmean((grads, loss), "data")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def two(params, batch):
    grads = jax.grad(lambda p: lax.pmean(loss_fn(p, batch), "data"))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def three(params, batch):
    local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
    grads = lax.pmean(jax.grad(loss_fn)(local, batch), "data")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def four(params, batch):
    total = lambda p: ((batch["x"] @ p - batch["y"]) ** 2).sum()
    count = lax.psum(batch["x"].shape[0], "data")
    grads = jax.tree.map(lambda g: g / count, jax.grad(total)(params))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

@jax.jit
def five(params, batch):
    mean = jax.shard_map(
        lambda p, b: lax.pmean(loss_fn(p, b), "data"),
        mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
    )
    grads = jax.grad(mean)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
""",
    "sharded parameters": """
@partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
def step(shard, batch):
    def loss(shard):
        params = lax.all_gather(shard, "data", tiled=True)
        return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    g = jax.grad(loss)(shard)
    return shard - 0.1 * g / lax.axis_size("data")
""",
    "jit over a mesh": """
batch_sharding = NamedSharding(mesh, P("data"))
replicated = NamedSharding(mesh, P())

@partial(jax.jit, donate_argnums=0)
def step(state, batch):
    def loss(p):
        rows = (batch["x"] @ p - batch["y"]) ** 2
        return (rows * batch["mask"]).sum() / batch["mask"].sum()
    loss, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), loss

def train(state, loader):
    state = jax.device_put(state, replicated)
    for number, batch in enumerate(loader):
        batch = jax.device_put(batch, batch_sharding)
        state, loss = step(state, batch)
        if number % 100 == 0:
            print(f"{number}: {float(loss):.3f}")
    return state, float(loss)
""",
    "a reference on the whole batch": """
reference = jax.jit(jax.grad(loss_fn))
params = jax.device_put({}, NamedSharding(mesh, P()))
batch = jax.device_put({}, NamedSharding(mesh, P()))
expected = reference(params, batch)
""",
    "per-example masks and gathered denominators": """
def loss_of(params, batch):
    rows = (batch["x"] @ params) * batch["mask"]
    rows = rows.sum(axis=-1) / batch["mask"].sum(axis=-1)
    return rows.mean() + 1e-4 * jnp.sum(params ** 2)

@partial(jax.pmap, axis_name="i")
def step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    grads = lax.pmean(grads, "i")
    return state.apply_gradients(grads=grads), lax.pmean(loss, "i")

@partial(jax.pmap, axis_name="i")
def attention(params, x):
    weights = jnp.exp(x @ params)
    weights = weights / weights.sum(-1, keepdims=True)
    return lax.pmean(weights.mean(), "i")
""",
    "keys of each replica's own": """
@partial(jax.pmap, axis_name="i")
def one(state, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    grads = jax.grad(lambda p: jnp.mean((batch["x"] + noise) @ p))(state.params)
    return state.apply_gradients(grads=lax.pmean(grads, "i"))

@partial(jax.pmap, axis_name="i", in_axes=(None, 0))
def create(key, x):
    return nn.Dense(3).init(key, x)

@partial(jax.pmap, axis_name="i", in_axes=(None, 0, None))
def noisy_gradient(params, batch, key):
    grads = lax.pmean(jax.grad(loss_fn)(params, batch), "i")
    grads = grads + jax.random.normal(key, params.shape)
    return params - 0.1 * grads
""",
    "compiled once, or once a configuration": """
def train(params, loader):
    step = jax.jit(lambda p, b: jax.grad(loss_fn)(p, b))
    for batch in loader:
        grads = step(params, batch)

def measure(x):
    for count in (1, 2, 4):
        f = jax.pmap(lambda x: x * 2, devices=jax.devices()[:count])
        f(x)
    for size in range(20):
        g = jax.jit(lambda x: x[:size])
        g(x)
    for _ in range(20):
        jax.jit(loss_fn)(x, x)
""",
    "accumulated and divided": """
@partial(jax.pmap, axis_name="i")
def step(state, batches):
    total = None
    for batch in batches:
        grads = jax.grad(loss_fn)(state.params, batch)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    total = jax.tree.map(lambda g: g / len(batches), total)
    return state.apply_gradients(grads=lax.pmean(total, "i"))

def scanned(params, batches):
    def one(total, batch):
        grads = jax.grad(lambda p: loss_fn(p, batch) / 4)(params)
        return jax.tree.map(jnp.add, total, grads), None
    total, _ = lax.scan(one, jax.tree.map(jnp.zeros_like, params), batches)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, lax.pmean(total, "i"))

def two_losses(params, batch):
    a = jax.grad(loss_fn)(params, batch)
    b = jax.grad(lambda p: jnp.mean(p ** 2))(params)
    grads = lax.pmean(jax.tree.map(jnp.add, a, b), "i")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

scanned = jax.pmap(scanned, axis_name="i")
two_losses = jax.pmap(two_losses, axis_name="i")
""",
    "values that are arguments, set before, made anew, or no longer read": """
rate = 0.1
rate = rate / 2

@jax.jit
def update(params, batch, rate, unused=None):
    grads = jax.grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)

params = {"w": jnp.zeros((3, 2))}
for batch in batches:
    params = update(params, batch, rate)
    rate = rate * 0.9

width = 3

@jax.jit
def widened(x):
    return jnp.zeros(width) + x

found = widened(1.0)
width = 4

def swept(rates, batch):
    for own in rates:

        @jax.jit
        def step(params):
            return jax.tree.map(lambda p: p * own, params)

        step(params)

def plain(x):
    return offset + x

for offset in (1, 2):
    plain(3)
""",
    "a share of the mean, as a checked shard_map wants it": """
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def step(params, batch):
    def share(p):
        rows = (batch["x"] @ p - batch["y"]) ** 2
        return rows.sum() / (len(rows) * lax.axis_size("data"))
    grads = jax.grad(share)(params)
    return params - 0.1 * grads

@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
def unchecked(params, batch):
    rows = lambda p: (batch["x"] @ p - batch["y"]) ** 2
    share = lambda p: rows(p).sum() / (rows(p).shape[0] * mesh.size)
    return params - 0.1 * lax.psum(jax.grad(share)(params), "data")
""",
    "a ring that passes gradients on": """
@partial(jax.pmap, axis_name="i")
def step(state, batch):
    devices = lax.axis_size("i")
    turn = [(n, (n + 1) % devices) for n in range(devices)]
    passing = total = jax.grad(loss_fn)(state.params, batch)
    for _ in range(devices - 1):
        passing = lax.ppermute(passing, "i", turn)
        total = total + passing
    return state.apply_gradients(grads=total / devices)
""",
    "a replicated state whose key is dealt out again": """
from flax import jax_utils
from flax.training.common_utils import shard_prng_key

class KeyedState(TrainState):
    dropout_rng: jax.Array

    def replicate(self):
        copies = jax_utils.replicate(self)
        return copies.replace(dropout_rng=shard_prng_key(self.dropout_rng))

def step(state, x):
    rng, new = jax.random.split(state.dropout_rng)
    def loss(p):
        return (state.apply_fn({"params": p}, x, rngs={"dropout": rng}) ** 2).mean()
    grads = lax.pmean(jax.grad(loss)(state.params), "i")
    return state.apply_gradients(grads=grads, dropout_rng=new)

p_step = jax.pmap(step, axis_name="i")
state = state.replicate()
for x in batches:
    state = p_step(state, x)
""",
}
