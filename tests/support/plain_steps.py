"""The training of `examples/` on one device in plain JAX, as short as possible.

Each is a generator of losses, `custom_step` of metrics; `docs/examples.md` counts its lines without
the `yield`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx
from replicax.verify.plain import plain_means


def mean_of_rows(loss: Any, optimizer: Any, params: Any, batches: Iterable[Any]) -> Iterator[Any]:
    @jax.jit
    def step(params, opt_state, batch):
        value, gradient = jax.value_and_grad(lambda p: jnp.mean(loss(p, batch, None)))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = optimizer.init(params)
    for batch in batches:
        params, opt_state, value = step(params, opt_state, batch)
        yield value


def weighted_mean(loss: Any, optimizer: Any, params: Any, batches: Iterable[Any]) -> Iterator[Any]:
    def mean(params, batch):
        found = loss(params, batch, None)
        return jnp.sum(found.values * found.weights) / jnp.sum(found.weights)

    @jax.jit
    def step(params, opt_state, batch):
        value, gradient = jax.value_and_grad(mean)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = optimizer.init(params)
    for batch in batches:
        params, opt_state, value = step(params, opt_state, batch)
        yield value


def with_metrics(loss: Any, optimizer: Any, params: Any, batches: Iterable[Any]) -> Iterator[Any]:
    def means(params, batch):
        found, metrics = loss(params, batch, None)
        return jnp.mean(found), jax.tree.map(jnp.mean, metrics)

    @jax.jit
    def step(params, opt_state, batch):
        (value, metrics), gradient = jax.value_and_grad(means, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, metrics

    opt_state = optimizer.init(params)
    for batch in batches:
        batch = jax.tree.map(np.asarray, batch)
        params, opt_state, value, _ = step(params, opt_state, batch)
        yield value


def frozen_backbone(loss: Any, optimizer: Any, model: Any, batches: Iterable[Any]) -> Iterator[Any]:
    def means(head, batch):
        found, metrics = loss({**model, "head": head}, batch, None)
        return jnp.mean(found), jax.tree.map(jnp.mean, metrics)

    @jax.jit
    def step(head, average, opt_state, batch):
        (value, metrics), gradient = jax.value_and_grad(means, has_aux=True)(head, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, head)
        head = optax.apply_updates(head, updates)
        average = optax.incremental_update(head, average, 0.02)
        return head, average, opt_state, value, metrics

    head = average = model["head"]
    opt_state = optimizer.init(head)
    for batch in batches:
        head, average, opt_state, value, _ = step(head, average, opt_state, batch)
        yield value


def lora(loss: Any, optimizer: Any, model: Any, batches: Iterable[Any]) -> Iterator[Any]:
    def means(model, batch):
        found, metrics = loss(model, batch, None)
        return jnp.mean(found), jax.tree.map(jnp.mean, metrics)

    @nnx.jit
    def step(model, updater, batch):
        some = nnx.DiffState(0, nnx.LoRAParam)
        found, gradient = nnx.value_and_grad(means, argnums=some, has_aux=True)(model, batch)
        updater.update(model, gradient)
        return found

    updater = nnx.Optimizer(model, optimizer, wrt=nnx.LoRAParam)
    for batch in batches:
        value, _ = step(model, updater, batch)
        yield value


def annealed(loss: Any, optimizer: Any, params: Any, batches: Iterable[Any]) -> Iterator[Any]:
    def means(params, batch, number):
        key = jax.random.fold_in(jax.random.key(0), number)
        found, metrics = loss(params, batch, key, number)
        return jnp.mean(found), jax.tree.map(jnp.mean, metrics)

    @jax.jit
    def step(params, opt_state, batch, number):
        (value, metrics), gradient = jax.value_and_grad(means, has_aux=True)(params, batch, number)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, metrics

    opt_state = optimizer.init(params)
    for number, batch in enumerate(batches):
        params, opt_state, value, _ = step(params, opt_state, batch, number)
        yield value


def averaged(loss: Any, optimizer: Any, params: Any, batches: Iterable[Any]) -> Iterator[Any]:
    @jax.jit
    def step(params, average, opt_state, batch, number):
        mean = lambda p: jnp.mean(loss(p, batch, jax.random.key(0), number))  # noqa: E731
        value, gradient = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 0.01), opt_state, value

    average, opt_state = params, optimizer.init(params)
    for number, batch in enumerate(batches):
        params, average, opt_state, value = step(params, average, opt_state, batch, number)
        yield value


def stateful(loss: Any, optimizer: Any, model: Any, batches: Iterable[Any]) -> Iterator[Any]:
    def mean(params, rest, state, batch):
        found = loss(rx.Stateful(eqx.combine(params, rest), state), batch, jax.random.key(0))
        return jnp.mean(found.values[0]), found.state

    @eqx.filter_jit
    def step(params, rest, opt_state, state, batch):
        (value, state), gradient = jax.value_and_grad(mean, has_aux=True)(
            params, rest, state, batch
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, value

    params, rest = eqx.partition(model.model, eqx.is_inexact_array)
    opt_state, state = optimizer.init(params), model.state
    for batch in batches:
        params, opt_state, state, value = step(params, rest, opt_state, state, batch)
        yield value


def custom_step(step: Any, state: Any, batches: Iterable[Any]) -> Iterator[Any]:
    step = jax.jit(step)
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch, number)
        yield metrics


def plain_forms(number: Any) -> Any:
    """Return a stand-in for `rx` in a custom step: one device, rows without padding."""
    return SimpleNamespace(
        value_and_grad=_means_and_gradient,
        mean=lambda values: jax.tree.map(partial(jnp.mean, axis=0), _value(values)),
        gather=lambda rows: rows,
        row_weights=lambda rows: jnp.ones(len(jax.tree.leaves(rows)[0])),
        row_numbers=lambda rows: jnp.arange(len(jax.tree.leaves(rows)[0])),
        step_number=lambda: number,
        ByRow=rx.ByRow,
    )


def first_rows(state: Any, rows: int) -> Any:
    """Return `state` with the first `rows` of each `rx.ByRow`."""

    def first(leaf: Any) -> Any:
        return rx.ByRow(jax.tree.map(lambda value: value[:rows], leaf.value))

    return jax.tree.map(lambda leaf: first(leaf) if _by_row(leaf) else leaf, state, is_leaf=_by_row)


def other_rows_of(state: Any, after: Any) -> Any:
    """Return `after` with those rows of `state` that it has not."""

    def filled(before: Any, now: Any) -> Any:
        put = lambda whole, first: whole.at[: len(first)].set(first)  # noqa: E731
        return rx.ByRow(jax.tree.map(put, before.value, now.value))

    return jax.tree.map(
        lambda before, now: filled(before, now) if _by_row(before) else now,
        state,
        after,
        is_leaf=_by_row,
    )


def _by_row(leaf: Any) -> bool:
    return isinstance(leaf, rx.ByRow)


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass
class Rows:
    """A stand-in for `rx.ExtraRows`, with leaves that `jax.jit` sees."""

    value: Any

    def map(self, function: Callable[[Any], Any]) -> "Rows":
        return Rows(function(self.value))


def with_plain_sets(batch: Any) -> Any:
    """Return `batch` with each `rx.ExtraRows` as `Rows`."""
    return jax.tree.map(
        lambda leaf: Rows(leaf.value) if _is_set(leaf) else leaf, batch, is_leaf=_is_set
    )


def _is_set(leaf: Any) -> bool:
    return isinstance(leaf, rx.ExtraRows)


def _value(of: Any) -> Any:
    return of.value if isinstance(of, Rows) else of


def _means_and_gradient(loss: Any, rows: bool = False) -> Callable[..., Any]:
    def means(params: Any, batch: Any, key: Any) -> Any:
        found = loss(params, _value(batch), key)
        values, metrics = found if isinstance(found, tuple) else (found, {})
        means, of_rows = plain_means(found), {"loss": values, **metrics}
        return means["loss"], (means, {name: _plain(each) for name, each in of_rows.items()})

    def found(params: Any, batch: Any, key: Any = None) -> Any:
        (_, (found, of_rows)), gradient = jax.value_and_grad(means, has_aux=True)(
            params, batch, key
        )
        return (found, gradient, of_rows) if rows else (found, gradient)

    return found


def _plain(each: Any) -> Any:
    return each.value if _by_row(each) else each


PLAIN_STEPS = {
    "diffusion": averaged,
    "equinox_state": stateful,
    "frozen_backbone": frozen_backbone,
    "lora": lora,
    "metrics": with_metrics,
    "packed_sequences": weighted_mean,
    "seq2seq": weighted_mean,
    "torch_dataloader": with_metrics,
    "vae": annealed,
}
"""By example; all others are `mean_of_rows`, or `custom_step`."""
