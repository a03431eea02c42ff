"""Optimizers by matrix: Muon has the numbers of optax, wherever the owner of a matrix is."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support.figures import refused
from support.tiers import EXHAUSTIVE, only
from support.training import epochs, normals, parallel, train

import replicax as rx
from replicax.analysis.compiled import CompiledStep, inspect
from replicax.core.ground.leaves import by_path
from replicax.core.placement.matrix_slots import MatrixGroup, MatrixStack, cost, dealt_matrices
from replicax.optimizers import _dims
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2

LAYERS = 3
MATRICES = {r"\['(up|down)'\]": None, r"\['gates'\]": (1, 3), r"\['odd'\]": (1, 0)}
"""Three of 128 entries in two shapes, six of 64, and one of 15, which no devices divide."""


def model() -> Any:
    draw = normals(0)
    blocks = {
        "up": draw(LAYERS, 8, 16) / 4,
        "down": draw(LAYERS, 16, 8) / 4,
        "gates": draw(LAYERS, 8, 2, 8) / 4,
        "bias": np.zeros((LAYERS, 8), np.float32),
    }
    return {"wte": draw(16, 8), "odd": draw(5, 3), "blocks": blocks}


def loss(model: Any, batch: Any, key: Any) -> Any:
    def block(x: Any, own: Any) -> Any:
        gates = jnp.einsum("bi,inj->bnj", x, own["gates"])
        x = x + gates[:, 0] * jnp.tanh(gates[:, 1])
        return x + jnp.tanh(x @ own["up"]) @ own["down"] + own["bias"], None

    x, _ = jax.lax.scan(block, model["wte"][batch["token"]], model["blocks"])
    x = x.at[:, : len(model["odd"])].add(jnp.tanh(x[:, :3] @ model["odd"].T))
    logits = x @ model["wte"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])


def source() -> Any:
    tokens = np.random.default_rng(0).integers(0, 16, 52)
    return {"token": tokens, "next": (tokens * 3 + 1) % 16}


def optimizer(rate: Any = 0.02, **given: Any) -> Any:
    return rx.optimizers.muon(rate, MATRICES, weight_decay=0.1, **given)


def apart(tree: Any) -> dict[str, Any]:
    """Return each matrix by itself, and the other leaves."""
    found = {}
    for path, dims in _dims(tree, MATRICES).items():
        leaf = by_path(tree)[path]
        if dims is None:
            found[path] = leaf
            continue
        own = (*dims.rows, *dims.columns)
        stack = [dim for dim in range(leaf.ndim) if dim not in own]
        each = leaf.transpose(*stack, *own)
        for at in np.ndindex(each.shape[: len(stack)]):
            found[f"{path} {at}"] = each[at]
    return found


def by_optax(**given: Any) -> Any:
    """Return `optax.contrib.muon` for what `apart` returns."""
    whole = optax.contrib.MuonDimensionNumbers()
    return optax.contrib.muon(
        0.02,
        weight_decay=0.1,
        muon_weight_dimension_numbers=lambda tree: {
            path: whole if " " in path else None for path in tree
        },
        **given,
    )


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("given", only([{}], [{}, {"consistent_rms": 0.2, "nesterov": False}]))
def test_each_matrix_has_the_bits_that_optax_gives_it_by_itself(given: Any) -> None:
    draw, params = normals(1), jax.tree.map(jnp.asarray, model())
    params["blocks"]["up"], params["blocks"]["down"] = draw(3, 32, 64), draw(3, 64, 32)
    ours, theirs = optimizer(**given), optax.contrib.muon(0.02, weight_decay=0.1, **given)
    update, of_one = jax.jit(ours.update), jax.jit(theirs.update)
    state, states = ours.init(params), {p: theirs.init(x) for p, x in apart(params).items()}
    for _ in range(3):
        gradient = jax.tree.map(lambda leaf: jnp.asarray(draw(*leaf.shape)), params)
        updates, state = update(gradient, state, params)
        for path, expected in apart(updates).items():
            if " " in path:
                given_here = apart(gradient)[path], states[path], apart(params)[path]
                found, states[path] = of_one(*given_here)
                np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("count", only([7], [1, 7, 8, 15]))
def test_any_number_of_matrices_of_any_dtype(count: int) -> None:
    params = {"w": jnp.ones((count, 4, 8), jnp.bfloat16)}
    gradient = {"w": jnp.asarray(normals(0)(count, 4, 8))}
    ours, theirs = rx.optimizers.muon(0.1, "w"), optax.contrib.muon(0.1)
    updates, _ = ours.update(gradient, ours.init(params), params)
    for at in range(count):
        one = params["w"][at]
        expected, _ = theirs.update(gradient["w"][at], theirs.init(one), one)
        np.testing.assert_allclose(updates["w"][at], expected, rtol=0, atol=1e-6)
        assert updates["w"].dtype == expected.dtype


def test_a_state_is_that_of_the_shape_of_its_matrix() -> None:
    first = optax.GradientTransformation(
        lambda matrix: jnp.full((), matrix.shape[0], jnp.float32),
        lambda gradient, state, params=None: (gradient * state, state),
    )
    params = {"a": jnp.ones((2, 4)), "b": jnp.ones((4, 2))}
    optimizer = rx.optimizers.by_matrix(first, ["a", "b"], rest=optax.sgd(0.1))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert (updates["a"] == 2).all()
    assert (updates["b"] == 4).all()


def trained(devices: int, mode: str, layout: str, **settings: Any) -> tuple[Any, Any]:
    """Return the model after two epochs of four batches, the last padded; and its SHA-256."""
    given = settings.pop("optimizer", optimizer())
    dp = parallel(loss, given, devices=devices, mode=mode, layout=layout, **settings)
    state, _ = train(dp, model(), epochs(dp, source(), 16, 2))
    found = jax.tree.map(np.asarray, dp.model(state))
    bits = hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(found)))
    return found, bits.hexdigest()


def plain() -> Any:
    """Return the same of plain JAX, with `optax.contrib.muon` on matrices apart."""
    params, optimizer = jax.tree.map(jnp.asarray, model()), by_optax()
    state = optimizer.init(apart(params))

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda params: jnp.mean(loss(params, batch, None)))(params)
        updates, state = optimizer.update(apart(gradient), state, apart(params))
        return updates, state

    for _ in range(2):
        for first in range(0, 52, 16):
            batch = {name: rows[first : first + 16] for name, rows in source().items()}
            updates, state = step(params, state, batch)
            params = joined(params, optax.apply_updates(apart(params), updates))
    return params


def joined(like: Any, each: dict[str, Any]) -> Any:
    """Return what `apart` takes apart."""
    flat = []
    for path, dims in _dims(like, MATRICES).items():
        leaf = by_path(like)[path]
        if dims is None:
            flat.append(each[path])
            continue
        own = (*dims.rows, *dims.columns)
        order = [*(dim for dim in range(leaf.ndim) if dim not in own), *own]
        stacked = jnp.stack([value for name, value in each.items() if name.startswith(f"{path} ")])
        whole = stacked.reshape([leaf.shape[dim] for dim in order])
        flat.append(whole.transpose(np.argsort(order)))
    return jax.tree.unflatten(jax.tree.structure(like), flat)


SETUPS = [
    ("single", "replicated", 1),
    ("jit", "replicated", 4),
    ("pmap", "replicated", 4),
    ("exact", "zero1", 4),
    *(
        (mode, layout, n)
        for mode in ("jit", "shard_map")
        for layout in ("zero1", "fsdp")
        for n in (2, 8)
    ),
]


@EXHAUSTIVE
@pytest.mark.parametrize(("mode", "layout", "devices"), SETUPS)
def test_every_mode_and_layout_trains_as_plain_jax(mode: str, layout: str, devices: int) -> None:
    found, _ = trained(devices, mode, layout)
    for path, leaf in by_path(plain()).items():
        np.testing.assert_allclose(by_path(found)[path], leaf, rtol=0, atol=1e-6, err_msg=path)


@EXHAUSTIVE
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("layout", ["zero1", "replicated"])
def test_exact_has_the_same_bits_on_any_number_of_devices(layout: str) -> None:
    assert len({trained(devices, "exact", layout)[1] for devices in (1, 2, 4, 8)}) == 1


INJECTED = optax.inject_hyperparams(lambda learning_rate: optimizer(rate=learning_rate))
AROUND: list[dict[str, Any]] = [
    {"mode": "exact", "optimizer": INJECTED(optax.linear_schedule(0.02, 0.01, 8))},
    {"accumulate": 2},
    {"precision": "bfloat16"},
    {"ema": 0.9},
    {"optimizer": optax.chain(optax.clip_by_global_norm(0.1), optimizer())},
    {
        "accumulate": 2,
        "ema": 0.9,
        "optimizer": optax.chain(optax.clip_by_global_norm(0.1), optimizer()),
    },
]


@EXHAUSTIVE
@pytest.mark.parametrize("settings", AROUND)
def test_what_is_around_it_is_as_on_one_device(settings: Any) -> None:
    given = dict(settings)
    mode = given.pop("mode", "jit")
    one, _ = trained(1, "single", "replicated", **given)
    several, _ = trained(4, mode, "zero1", **given)
    bound = 1e-6 if "precision" not in settings else 1e-2  # rounded to 8 bits, in another order
    for path, leaf in by_path(one).items():
        np.testing.assert_allclose(by_path(several)[path], leaf, rtol=0, atol=bound, err_msg=path)


def shampoo(rate: float) -> optax.GradientTransformation:
    """Shampoo (Gupta et al. 2018) for one matrix: both sides by the fourth roots of sums."""

    def init(matrix: Any) -> Any:
        return tuple(1e-2 * jnp.eye(size) for size in matrix.shape)

    def root(side: Any) -> Any:
        values, vectors = jnp.linalg.eigh(side)
        return (vectors * values**-0.25) @ vectors.T

    def update(gradient: Any, state: Any, params: Any = None) -> Any:
        rows, columns = state[0] + gradient @ gradient.T, state[1] + gradient.T @ gradient
        return -rate * root(rows) @ gradient @ root(columns), (rows, columns)

    return optax.GradientTransformation(init, update)


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("mode", "layout", "devices"),
    [("jit", "zero1", 4), ("jit", "fsdp", 2), ("shard_map", "zero1", 8), ("exact", "zero1", 2)],
)
def test_an_optimizer_of_ones_own_has_whole_matrices(mode: str, layout: str, devices: int) -> None:
    given = rx.optimizers.by_matrix(shampoo(0.02), MATRICES, rest=optax.adamw(0.02))
    one, _ = trained(1, "single", "replicated", optimizer=given)
    several, _ = trained(devices, mode, layout, optimizer=given)
    for path, leaf in by_path(one).items():
        np.testing.assert_allclose(by_path(several)[path], leaf, rtol=0, atol=2e-6, err_msg=path)


@EXHAUSTIVE
def test_a_run_goes_on_on_other_devices(tmp_path: Path) -> None:
    def run(devices: int, steps: int, folder: Path) -> Any:
        dp = parallel(loss, optimizer(), devices=devices, mode="exact", layout="zero1")
        settings: Any = {"batch_size": 16, "epochs": None, "progress": False, "run_dir": folder}
        return rx.fit(dp, dp.init(model()), source(), steps=steps, **settings).state

    run(8, 3, tmp_path / "two")
    states = run(2, 6, tmp_path / "two"), run(1, 6, tmp_path / "one")
    for two, one in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(two, one)


def step_of(devices: int, layout: str, optimizer: Any = None) -> CompiledStep:
    """Return the step of a model whose stacks any number of devices divides."""
    draw, wide = normals(0), model()
    shapes = {"up": (8, 8, 16), "down": (8, 16, 8), "gates": (8, 8, 2, 8), "bias": (8, 8)}
    wide["blocks"] = {name: draw(*shape) for name, shape in shapes.items()}
    stacks = {regex: dims for regex, dims in MATRICES.items() if "odd" not in regex}
    given = optimizer or rx.optimizers.muon(0.02, stacks, weight_decay=0.1)
    dp = parallel(loss, given, devices=devices, mode="shard_map", layout=layout)
    state, batch = dp.init(wide), next(iter(dp.feed(source(), batch_size=16)))
    [compiled] = dp.program(state).step.compiled(state, batch)
    return inspect(compiled)


@EXHAUSTIVE
@pytest.mark.parametrize(("layout", "devices", "ways"), [("zero1", 8, 1), ("fsdp", 2, 3)])
def test_a_step_sends_what_adamw_sends_and_matrices_to_owners(
    layout: str, devices: int, ways: int
) -> None:
    """With `fsdp`, parameters are taken to owners too, and updates back."""
    ours, adamw = step_of(devices, layout), step_of(devices, layout, optax.adamw(0.1))
    sent = {each.kind: each.bytes for each in ours.collectives}
    assert sent.pop("all-to-all") == ways * 4 * 8 * (8 * 16 + 16 * 8 + 8 * 2 * 8) // devices
    assert sent == {each.kind: each.bytes for each in adamw.collectives}


@EXHAUSTIVE
def test_each_device_does_its_share_of_the_products() -> None:
    flops = [step_of(4, layout).flops for layout in ("replicated", "zero1")]
    without = step_of(4, "replicated", optax.sgd(0.1)).flops
    assert 4 * (flops[1] - without) == flops[0] - without > 0


@pytest.mark.parametrize("preset", only(["124m"], ["nano", "124m", "350m"]))
def test_each_owner_of_gpt2_has_equally_much(preset: str) -> None:
    params = jax.eval_shape(partial(transformer.init, _shape(preset)), jax.random.key(0))
    groups, loads = shares(params, transformer.MATRICES, owners=8)
    assert max(loads) == min(loads)
    assert all(group.is_in_order for group in groups)


def _shape(preset: str) -> transformer.Shape:
    size = {"layers": 4, "heads": 4, "width": 128, "context": 128, **GPT2.presets[preset]}
    return transformer.Shape(size["layers"], size["heads"], size["width"], size["context"], 256)


def shares(params: Any, matrices: Any, owners: int) -> tuple[Sequence[MatrixGroup], list[int]]:
    """Return the groups, and the cost of what each owner has."""
    leaves = by_path(params)
    stacks = [
        MatrixStack(tuple(leaves[path].shape), leaves[path].dtype, dims)
        for path, dims in _dims(params, matrices).items()
        if dims is not None
    ]
    groups, loads = dealt_matrices(optax.contrib.muon(0.1), stacks, owners), [0] * owners
    for group in groups:
        slots = len(group.kinds) // owners
        for slot, kind in enumerate(group.kinds):
            if kind < len(group.forms):
                loads[slot // slots] += cost(group.forms[kind].shape)
    return groups, loads


def test_what_is_left_over_goes_to_those_with_the_least() -> None:
    sizes = {"a": (3, 8, 8), "b": (2, 4, 4), "c": (4, 4)}
    params = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    _, loads = shares(params, dict.fromkeys("abc"), owners=2)
    assert loads == [2 * 512 + 64, 512 + 2 * 64]


def test_stacks_of_vectors_and_what_is_called_bias_are_no_matrices() -> None:
    params = {
        "blocks": {
            "kernel": np.zeros((2, 4, 4)),
            "gain": np.zeros((2, 4)),
            "bias": np.zeros((2, 3, 4)),
            "phase": np.zeros(4),
        },
        "last_norm": {"kernel": np.zeros((4, 2)), "none": np.zeros((0, 4))},
    }
    found = {path for path, dims in _dims(params, {"": None}).items() if dims}
    assert found == {"['blocks']['kernel']", "['last_norm']['kernel']"}


@pytest.mark.parametrize(
    ("matrices", "parts"),
    [
        (None, ["['blocks']['down']", 4]),
        ("nothing", ["nothing", "['blocks']['down']", 4]),
        ("wte", ["['wte']", ": (0, 1)}"]),
        ("gates", ["[3, 8, 2, 8]", 4, ": (rows, columns)}"]),
        *(({"up": dims}, ["[3, 8, 16]", dims, 2]) for dims in [(1, 3), (1, 1), (), 5, ((), 1)]),
        ("(", ["'('"]),
        (3, [3]),
    ],
)
def test_what_is_no_hidden_matrix_is_refused(matrices: Any, parts: list[Any]) -> None:
    with refused(rx.errors.ConfigError, *parts) as caught:
        parallel(loss, rx.optimizers.muon(0.1, matrices)).init(model())
    assert "update(" not in str(caught.value)  # it is no error of an unknown optimizer


def test_owners_that_devices_cannot_share_are_refused() -> None:
    with refused(rx.errors.ConfigError, 6, "zero1", 4):
        parallel(loss, optimizer(owners=6), layout="zero1").init(model())
    with refused(rx.errors.ConfigError, "owners=0"):
        optimizer(owners=0)


def test_what_is_no_optimizer_is_refused() -> None:
    rx.optimizers.by_matrix(optax.sgd(0.1), "up", rest=optax.MultiSteps(optax.sgd(0.1), 2))  # type: ignore[arg-type]
    with refused(rx.errors.ConfigError, "transform"):
        rx.optimizers.by_matrix(optax.sgd, "up", rest=optax.sgd(0.1))  # type: ignore[arg-type]
    with refused(rx.errors.ConfigError, "adam_learning_rate"):
        optimizer(adam_learning_rate=0.1)


@EXHAUSTIVE
@pytest.mark.parametrize("layout", ["zero1", "replicated"])
def test_verify_passes_it(layout: str) -> None:
    dp = parallel(loss, optimizer(), devices=2, layout=layout)
    assert rx.verify(dp, model(), source()).ok
