"""Backward passes that are not those of the loss, alone or between replicas."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from caught_programs.parts import (
    IGNORED,
    RATE,
    Handwritten,
    Loss,
    losses,
    mesh_of,
    normal,
)
from jax.sharding import PartitionSpec as P

import replicax as rx


def each_loss(hidden: Any, head: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)


def network() -> Any:
    return {"body": normal(9, 3, 6) / 2, "head": normal(10, 6, 5) / 2}


class MaxText4959(Loss):
    """A tiled loss passes its cotangent to the head, and not to the hidden states"""

    project, number, also = "AI-Hypercomputer/maxtext", "4959", "4699"
    model = staticmethod(network)

    @staticmethod
    def broken(model: Any, batch: Any, key: Any) -> Any:
        @jax.custom_vjp
        def tiled(hidden: Any, head: Any, labels: Any) -> Any:
            return each_loss(hidden, head, labels)

        def forward(hidden: Any, head: Any, labels: Any) -> Any:
            return each_loss(hidden, head, labels), (hidden, head, labels)

        def backward(kept: Any, cotangent: Any) -> Any:
            hidden, head, labels = kept
            _, back = jax.vjp(lambda hidden: each_loss(hidden, head, labels), hidden)
            _, of_head = jax.vjp(lambda head: each_loss(hidden, head, labels), head)
            return back(jnp.ones_like(cotangent))[0], of_head(cotangent)[0], None

        tiled.defvjp(forward, backward)
        labels = jnp.maximum(batch["labels"], 0)
        each = tiled(jnp.tanh(batch["x"] @ model["body"]), model["head"], labels)
        return rx.Weighted(each, batch["labels"] != IGNORED)

    @staticmethod
    def mended(model: Any, batch: Any, key: Any) -> Any:
        @jax.custom_vjp
        def tiled(hidden: Any, head: Any, labels: Any) -> Any:
            return each_loss(hidden, head, labels)

        def forward(hidden: Any, head: Any, labels: Any) -> Any:
            return each_loss(hidden, head, labels), (hidden, head, labels)

        def backward(kept: Any, cotangent: Any) -> Any:
            hidden, head, labels = kept
            _, back = jax.vjp(lambda hidden: each_loss(hidden, head, labels), hidden)
            _, of_head = jax.vjp(lambda head: each_loss(hidden, head, labels), head)
            return back(cotangent)[0], of_head(cotangent)[0], None

        tiled.defvjp(forward, backward)
        labels = jnp.maximum(batch["labels"], 0)
        each = tiled(jnp.tanh(batch["x"] @ model["body"]), model["head"], labels)
        return rx.Weighted(each, batch["labels"] != IGNORED)


def sequence() -> Any:
    return {"x": normal(11, 16, 3), "y": normal(12, 16, 3)}


def attention() -> Any:
    return {"query": normal(13, 3, 4), "key": normal(14, 3, 4), "norm": normal(15, 4)}


def normed(keys: Any, norm: Any) -> Any:
    return keys * jax.lax.rsqrt(jnp.mean(keys**2, 1, keepdims=True) + 1e-6) * norm


def attend(state: Any, rows: Any, keys: Any, values: Any) -> Any:
    found = jax.nn.softmax(rows["x"] @ state["query"] @ keys.T) @ values
    return jnp.sum((found - rows["y"]) ** 2)


def one_device_of_attention(state: Any, rows: Any) -> Any:
    def loss(state: Any) -> Any:
        keys = normed(rows["x"] @ state["key"], state["norm"])
        return attend(state, rows, keys, rows["x"]) / len(rows["x"])

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, slope: w - RATE * slope, state, gradient), value


class VeOmni419(Handwritten):
    """The norm's backward pass runs before the gradient is collected from the other ranks"""

    project, number, also = "ByteDance-Seed/VeOmni", "419", "420"
    reference, state = staticmethod(one_device_of_attention), staticmethod(attention)
    batch = staticmethod(sequence)

    @staticmethod
    def broken() -> Any:
        @jax.custom_vjp
        def gathered_keys(x: Any, key: Any, norm: Any) -> Any:
            return jax.lax.all_gather(normed(x @ key, norm), "sequence", tiled=True)

        def forward(x: Any, key: Any, norm: Any) -> Any:
            return gathered_keys(x, key, norm), (x, key, norm)

        def backward(kept: Any, cotangent: Any) -> Any:
            x, key, norm = kept
            mine = jax.lax.axis_index("sequence") * len(x)
            of_keys = jax.lax.dynamic_slice_in_dim(cotangent, mine, len(x))
            _, of_norm = jax.vjp(normed, x @ key, norm)[1](of_keys)
            of_keys = jax.lax.psum_scatter(cotangent, "sequence", tiled=True)
            return jnp.zeros_like(x), x.T @ of_keys, of_norm

        gathered_keys.defvjp(forward, backward)

        @partial(jax.pmap, axis_name="sequence")
        def step(state: Any, rows: Any) -> Any:
            values = jax.lax.all_gather(rows["x"], "sequence", tiled=True)

            def loss(state: Any) -> Any:
                keys = gathered_keys(rows["x"], state["key"], state["norm"])
                return attend(state, rows, keys, values) / len(values)

            value, gradient = jax.value_and_grad(loss)(state)
            value, gradient = jax.lax.psum((value, gradient), "sequence")
            return jax.tree.map(lambda w, slope: w - RATE * slope, state, gradient), value

        return step

    @staticmethod
    def mended() -> Any:
        @jax.custom_vjp
        def gathered_keys(x: Any, key: Any, norm: Any) -> Any:
            return jax.lax.all_gather(normed(x @ key, norm), "sequence", tiled=True)

        def forward(x: Any, key: Any, norm: Any) -> Any:
            return gathered_keys(x, key, norm), (x, key, norm)

        def backward(kept: Any, cotangent: Any) -> Any:
            x, key, norm = kept
            of_keys = jax.lax.psum_scatter(cotangent, "sequence", tiled=True)
            of_keys, of_norm = jax.vjp(normed, x @ key, norm)[1](of_keys)
            return jnp.zeros_like(x), x.T @ of_keys, of_norm

        gathered_keys.defvjp(forward, backward)

        @partial(jax.pmap, axis_name="sequence")
        def step(state: Any, rows: Any) -> Any:
            values = jax.lax.all_gather(rows["x"], "sequence", tiled=True)

            def loss(state: Any) -> Any:
                keys = gathered_keys(rows["x"], state["key"], state["norm"])
                return attend(state, rows, keys, values) / len(values)

            value, gradient = jax.value_and_grad(loss)(state)
            value, gradient = jax.lax.psum((value, gradient), "sequence")
            return jax.tree.map(lambda w, slope: w - RATE * slope, state, gradient), value

        return step


def of_own_words(w: Any, row: Any) -> Any:
    return jnp.sum(losses(w, jax.tree.map(lambda leaf: leaf[None], row)))


def smaller(slope: Any) -> Any:
    return slope * jnp.minimum(1.0, 0.1 / jnp.sqrt(jnp.sum(slope**2)))


def one_device_by_row(w: Any, batch: Any) -> Any:
    slopes = jax.vmap(jax.grad(of_own_words), in_axes=(None, 0))(w, batch)
    return w - RATE * jnp.mean(jax.vmap(smaller)(slopes), 0), jnp.mean(losses(w, batch))


class JAX36886(Handwritten):
    """Gradients of single rows by weights that all replicas have are added up over replicas"""

    project, number = "jax-ml/jax", "36886"
    reference = staticmethod(one_device_by_row)

    @staticmethod
    def broken() -> Any:
        def step(w: Any, batch: Any) -> Any:
            slopes = jax.vmap(jax.grad(of_own_words), in_axes=(None, 0))(w, batch)
            mean = jax.lax.pmean(jnp.mean(jax.vmap(smaller)(slopes), 0), "data")
            return w - RATE * mean, jax.lax.pmean(jnp.mean(losses(w, batch)), "data")

        mesh = mesh_of((4,), ("data",))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))

    @staticmethod
    def mended() -> Any:
        def step(w: Any, batch: Any) -> Any:
            own = jax.lax.pcast(w, "data", to="varying")
            slopes = jax.vmap(jax.grad(of_own_words), in_axes=(None, 0))(own, batch)
            mean = jax.lax.pmean(jnp.mean(jax.vmap(smaller)(slopes), 0), "data")
            return w - RATE * mean, jax.lax.pmean(jnp.mean(losses(w, batch)), "data")

        mesh = mesh_of((4,), ("data",))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))


def pairs() -> Any:
    return {"x": normal(16, 16, 3), "other": normal(17, 16, 3)}


def contrast(one: Any, others: Any, first: Any) -> Any:
    labels = first + jnp.arange(len(one))
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(one @ others.T, labels))


def one_device_of_pairs(w: Any, rows: Any) -> Any:
    def loss(w: Any) -> Any:
        return contrast(rows["x"] @ w, rows["other"] @ w, 0) / len(rows["x"])

    value, gradient = jax.value_and_grad(loss)(w)
    return w - RATE * gradient, value


class MsSwift10150(Handwritten):
    """The gathered rows of other ranks pass no gradient, and DDP divides what is left by N"""

    project, number = "modelscope/ms-swift", "10150"
    reference, state = staticmethod(one_device_of_pairs), staticmethod(lambda: normal(18, 3, 4))
    batch = staticmethod(pairs)

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, rows: Any) -> Any:
            first = jax.lax.axis_index("data") * len(rows["x"])

            def loss(w: Any) -> Any:
                one, other = rows["x"] @ w, rows["other"] @ w
                gathered = jax.lax.stop_gradient(jax.lax.all_gather((one, other), "data"))
                size = jax.lax.axis_size("data")
                one, other = (
                    whole.at[first // len(rows["x"])].set(own).reshape(size * len(own), -1)
                    for whole, own in zip(gathered, (one, other), strict=True)
                )
                return contrast(one, other, 0) / len(one)

            value, gradient = jax.value_and_grad(loss)(w)
            gradient = jax.lax.pmean(gradient, "data")
            return w - RATE * gradient, jax.lax.pmean(value, "data")

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, rows: Any) -> Any:
            first = jax.lax.axis_index("data") * len(rows["x"])

            def loss(w: Any) -> Any:
                one, other = rows["x"] @ w, rows["other"] @ w
                gathered = jax.lax.stop_gradient(jax.lax.all_gather((one, other), "data"))
                size = jax.lax.axis_size("data")
                one, other = (
                    whole.at[first // len(rows["x"])].set(own).reshape(size * len(own), -1)
                    for whole, own in zip(gathered, (one, other), strict=True)
                )
                return contrast(one, other, 0) / len(one)

            value, gradient = jax.value_and_grad(loss)(w)
            gradient = jax.lax.pmean(gradient * jax.lax.axis_size("data"), "data")
            return w - RATE * gradient, jax.lax.pmean(value, "data")

        return step


def grid() -> Any:
    return normal(19, 3, 4)


def points() -> Any:
    return {"x": normal(20, 16, 3), "y": normal(21, 16)}


def transformed(grid: Any, x: Any) -> Any:
    return jnp.sum(jnp.cos(x @ grid), 1)


def one_device_of_points(grid: Any, rows: Any) -> Any:
    def loss(grid: Any) -> Any:
        return jnp.mean((transformed(grid, rows["x"]) - rows["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(grid)
    return grid - 0.1 * gradient, value


class JAXFinufft226(Handwritten):
    """A foreign call's gradient by what all replicas have is not added up, as JAX's own is"""

    project, number = "flatironinstitute/jax-finufft", "226"
    reference, state = staticmethod(one_device_of_points), staticmethod(grid)
    batch = staticmethod(points)

    @staticmethod
    def broken() -> Any:
        @jax.custom_vjp
        def nufft2(grid: Any, x: Any) -> Any:
            return foreign(transformed, x[:, 0], grid, x)

        def backward(kept: Any, cotangent: Any) -> Any:
            return foreign(of_grid, kept[0], *kept, cotangent), jnp.zeros_like(kept[1])

        nufft2.defvjp(lambda grid, x: (nufft2(grid, x), (grid, x)), backward)

        def step(grid: Any, rows: Any) -> Any:
            def loss(grid: Any) -> Any:
                found = nufft2(grid, rows["x"])
                return jax.lax.pmean(jnp.mean((found - rows["y"]) ** 2), "data")

            value, gradient = jax.value_and_grad(loss)(grid)
            return grid - 0.1 * gradient, value

        mesh = mesh_of((4,), ("data",))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))

    @staticmethod
    def mended() -> Any:
        def varying(value: Any) -> Any:
            return jax.lax.pcast(value, "data", to="varying")

        @jax.custom_vjp
        def nufft2(grid: Any, x: Any) -> Any:
            return varying(foreign(transformed, x[:, 0], grid, x))

        def backward(kept: Any, cotangent: Any) -> Any:
            return varying(foreign(of_grid, kept[0], *kept, cotangent)), jnp.zeros_like(kept[1])

        nufft2.defvjp(lambda grid, x: (nufft2(grid, x), (grid, x)), backward)

        def step(grid: Any, rows: Any) -> Any:
            def loss(grid: Any) -> Any:
                found = nufft2(varying(grid), rows["x"])
                return jax.lax.pmean(jnp.mean((found - rows["y"]) ** 2), "data")

            value, gradient = jax.value_and_grad(loss)(grid)
            return grid - 0.1 * gradient, value

        mesh = mesh_of((4,), ("data",))
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))


def of_grid(grid: Any, x: Any, cotangent: Any) -> Any:
    return jax.vjp(lambda grid: transformed(grid, x), grid)[1](cotangent)[0]


def foreign(function: Any, like: Any, *arguments: Any) -> Any:
    """Call what JAX does not see; it does not know that the result varies over replicas."""
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.pure_callback(function, shape, *arguments)
