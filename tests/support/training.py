"""Small steps on the first devices, trained batch by batch, and the same in plain JAX on one."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.verify.plain import plain_means


def normals(seed: int) -> Callable[..., np.ndarray]:
    """Return a function that draws an array of a shape."""
    numbers = np.random.default_rng(seed)
    return lambda *shape: numbers.normal(size=shape).astype(np.float32)


def parallel(*given: Any, devices: int = 4, mode: str = "jit", **settings: Any) -> rx.DataParallel:
    """Return a `DataParallel` on the first devices; in mode `single` on one."""
    mesh = rx.make_mesh(devices=jax.devices()[: 1 if mode == "single" else devices])
    return rx.DataParallel(*given, **{"mesh": mesh, "mode": mode, **settings})


def train(
    dp: rx.DataParallel, model: Any, batches: Iterable[Any]
) -> tuple[rx.TrainState, list[dict[str, float]]]:
    """Return the state after a step on each batch, and the metrics of each."""
    state, told = dp.init(model), []
    for batch in batches:
        state, metrics = dp.step(state, batch)
        told.append({name: float(value) for name, value in metrics.items()})
    return state, told


def losses(told: list[dict[str, float]]) -> list[float]:
    return [metrics["loss"] for metrics in told]


def epochs(
    dp: rx.DataParallel, source: Any, batch_size: int, count: int, **settings: Any
) -> Iterator[Any]:
    """The batches of `count` epochs."""
    for epoch in range(count):
        yield from dp.feed(source, batch_size, epoch=epoch, **settings)


def slices(source: dict[str, Any], batch_size: int) -> list[dict[str, Any]]:
    """Return the batches of an epoch in order, without padding: the last one may be short."""
    rows = len(next(iter(source.values())))
    return [
        {name: leaf[at : at + batch_size] for name, leaf in source.items()}
        for at in range(0, rows, batch_size)
    ]


def by_hand(
    loss: Any,
    optimizer: optax.GradientTransformation,
    params: Any,
    batches: Iterable[Any],
) -> tuple[Any, list[dict[str, float]]]:
    """Return what `train` does, of the parameters alone, from plain JAX on one device."""

    def means(params: Any, batch: Any) -> Any:
        found = plain_means(loss(params, batch, None))
        return found["loss"], found

    @jax.jit
    def step(params: Any, moments: Any, batch: Any) -> Any:
        gradient, metrics = jax.grad(means, has_aux=True)(params, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, metrics

    params, told = jax.tree.map(jnp.asarray, params), []
    moments = optimizer.init(params)
    for batch in batches:
        params, moments, metrics = step(params, moments, batch)
        told.append({name: float(value) for name, value in metrics.items()})
    return params, told


def assert_near(found: Any, wanted: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Check that two trees have the same structure, and leaves that are close."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=name)
