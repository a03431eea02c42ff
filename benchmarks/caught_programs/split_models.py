"""Experts, heads, vocabularies and optimizer states that are split over replicas too."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from caught_programs.parts import (
    DEVICES,
    IGNORED,
    RATE,
    Handwritten,
    clipped,
    mesh_of,
    norm_of,
    normal,
    tokens,
    total,
)
from jax.sharding import PartitionSpec as P


def experts() -> Any:
    return {"router": normal(5, 3, DEVICES), "experts": normal(6, DEVICES, 3, 5)}


def scored(logits: Any, batch: Any) -> Any:
    real = batch["labels"] != IGNORED
    labels = jnp.where(real, batch["labels"], 0)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(jnp.where(real, each, 0.0))


def mixed(state: Any, batch: Any) -> Any:
    """Return the mean loss of a mixture of all experts on one device."""
    shares = jax.nn.softmax(batch["x"] @ state["router"])
    logits = jnp.einsum("rte,rtd,edw->rtw", shares, batch["x"], state["experts"])
    return scored(logits, batch) / tokens(batch)


def descend(state: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda w, slope: w - RATE * slope, state, gradient)


def one_device_of_experts(state: Any, batch: Any) -> Any:
    loss, gradient = jax.value_and_grad(mixed)(state, batch)
    return descend(state, gradient), loss


def dispatched(state: Any, batch: Any) -> Any:
    """Return this replica's sum of losses; each replica computes one expert for all rows."""
    own = jax.lax.axis_index("data")
    shares = jax.nn.softmax(batch["x"] @ state["router"])
    x, shares = jax.lax.all_gather((batch["x"], shares), "data", tiled=True)
    part = jnp.take(shares, own, 2)[..., None] * (x @ jnp.take(state["experts"], own, 0))
    return scored(jax.lax.psum_scatter(part, "data", tiled=True), batch)


class PyTorch160285(Handwritten):
    """An expert's gradient has all ranks' tokens in it and is divided by its own group alone"""

    project, number, also = "pytorch/pytorch", "160285", "Megatron-LM #5956"
    reference, state = staticmethod(one_device_of_experts), staticmethod(experts)

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(state: Any, batch: Any) -> Any:
            mean = jax.lax.pmean(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda s: dispatched(s, batch) / mean)(state)
            gradient = {
                "router": jax.lax.pmean(gradient["router"], "data"),
                "experts": jax.lax.psum(gradient["experts"], "data"),  # each has one owner
            }
            return descend(state, gradient), jax.lax.pmean(loss, "data")

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(state: Any, batch: Any) -> Any:
            mean = jax.lax.pmean(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda s: dispatched(s, batch) / mean)(state)
            size = jax.lax.axis_size("data")
            gradient = {
                "router": jax.lax.pmean(gradient["router"], "data"),
                "experts": jax.lax.psum(gradient["experts"], "data") / size,
            }
            return descend(state, gradient), jax.lax.pmean(loss, "data")

        return step


def summed(value: Any) -> Any:
    """Add up over replicas; the gradient is passed on as it is, as in Megatron's regions."""
    return value + jax.lax.stop_gradient(jax.lax.psum(value, "expert") - value)


def own_expert(state: Any, batch: Any) -> Any:
    """Return the sum of losses of rows that all replicas have, of which each has one expert."""
    own = jax.lax.axis_index("expert")
    shares = jax.nn.softmax(batch["x"] @ state["router"])
    part = jnp.take(shares, own, 2)[..., None] * (batch["x"] @ jnp.take(state["experts"], own, 0))
    return scored(summed(part), batch)


class Transformers48205(Handwritten):
    """Each rank's router gradient knows its own experts' scores, and they are not added up"""

    project, number, also = "huggingface/transformers", "48205", "48687"
    reference, state = staticmethod(one_device_of_experts), staticmethod(experts)

    @staticmethod
    def broken() -> Any:
        def step(state: Any, batch: Any) -> Any:
            count = tokens(batch)
            loss, gradient = jax.value_and_grad(lambda s: own_expert(s, batch) / count)(state)
            gradient = {**gradient, "experts": jax.lax.psum(gradient["experts"], "expert")}
            return descend(state, gradient), loss

        mesh = mesh_of((DEVICES,), ("expert",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )

    @staticmethod
    def mended() -> Any:
        def step(state: Any, batch: Any) -> Any:
            count = tokens(batch)
            loss, gradient = jax.value_and_grad(lambda s: own_expert(s, batch) / count)(state)
            gradient = jax.lax.psum(gradient, "expert")
            return descend(state, gradient), loss

        mesh = mesh_of((DEVICES,), ("expert",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )


def normed_heads() -> Any:
    return {"heads": normal(7, DEVICES, 3, 5), "norm": np.ones(3, np.float32)}


def by_heads(state: Any, batch: Any, heads: Any) -> Any:
    """Return the logits that some heads add up to, of inputs scaled by a norm they share."""
    scaled = batch["x"] / (1 + jnp.abs(batch["x"])) * state["norm"]
    return jnp.tanh(jnp.einsum("rtd,hdw->rthw", scaled, heads)).sum(2)


def one_device_of_heads(state: Any, batch: Any) -> Any:
    def loss(state: Any) -> Any:
        return scored(by_heads(state, batch, state["heads"]), batch) / tokens(batch)

    value, gradient = jax.value_and_grad(loss)(state)
    return descend(state, gradient), value


def split_heads(state: Any, batch: Any) -> Any:
    own = jnp.take(state["heads"], jax.lax.axis_index("expert"), 0)
    return scored(summed(by_heads(state, batch, own[None])), batch)


class Megatron7452Norm(Handwritten):
    """The common norm of split heads is updated with the gradient of a replica's own heads"""

    project, number = "NVIDIA/Megatron-LM", "7452, finding 11"
    reference, state = staticmethod(one_device_of_heads), staticmethod(normed_heads)

    @staticmethod
    def broken() -> Any:
        def step(state: Any, batch: Any) -> Any:
            count = tokens(batch)
            loss, gradient = jax.value_and_grad(lambda s: split_heads(s, batch) / count)(state)
            gradient = {**gradient, "heads": jax.lax.psum(gradient["heads"], "expert")}
            return descend(state, gradient), loss

        mesh = mesh_of((DEVICES,), ("expert",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )

    @staticmethod
    def mended() -> Any:
        def step(state: Any, batch: Any) -> Any:
            count = tokens(batch)
            loss, gradient = jax.value_and_grad(lambda s: split_heads(s, batch) / count)(state)
            gradient = jax.lax.psum(gradient, "expert")
            return descend(state, gradient), loss

        mesh = mesh_of((DEVICES,), ("expert",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )


def wide() -> Any:
    return normal(8, 3, 8)


def sharded_entropy(logits: Any, batch: Any) -> Any:
    """Return the sum of cross-entropies, of logits that are a replica's part of the words."""
    words = logits.shape[-1]
    real = batch["labels"] != IGNORED
    place = jnp.where(real, batch["labels"], 0) - words * jax.lax.axis_index("words")
    inside = (place >= 0) & (place < words)
    own = jnp.take_along_axis(logits, jnp.clip(place, 0, words - 1)[..., None], 2)[..., 0]
    scores = summed_words(jnp.where(inside, own, 0.0))
    return jnp.sum(jnp.where(real, jnp.log(summed_words(jnp.exp(logits).sum(2))) - scores, 0.0))


def summed_words(value: Any) -> Any:
    return value + jax.lax.stop_gradient(jax.lax.psum(value, "words") - value)


class Megatron7452Logits(Handwritten):
    """Gathered logits enter the cross-entropy of split words: the loss plus log of their copies"""

    project, number = "NVIDIA/Megatron-LM", "7452, gathered logits"
    state = staticmethod(wide)

    @staticmethod
    def broken() -> Any:
        def step(w: Any, batch: Any) -> Any:
            def loss(w: Any) -> Any:
                own = jax.lax.dynamic_slice_in_dim(w, 2 * jax.lax.axis_index("words"), 2, 1)
                logits = jax.lax.all_gather(batch["x"] @ own, "words", axis=2, tiled=True)
                return sharded_entropy(logits, batch) / tokens(batch)

            value, gradient = jax.value_and_grad(loss)(w)
            return w - RATE * jax.lax.psum(gradient, "words"), value

        mesh = mesh_of((DEVICES,), ("words",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )

    @staticmethod
    def mended() -> Any:
        def step(w: Any, batch: Any) -> Any:
            def loss(w: Any) -> Any:
                own = jax.lax.dynamic_slice_in_dim(w, 2 * jax.lax.axis_index("words"), 2, 1)
                return sharded_entropy(batch["x"] @ own, batch) / tokens(batch)

            value, gradient = jax.value_and_grad(loss)(w)
            return w - RATE * jax.lax.psum(gradient, "words"), value

        mesh = mesh_of((DEVICES,), ("words",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )


def one_device_clipped(state: Any, batch: Any) -> Any:
    loss, gradient = jax.value_and_grad(mixed)(state, batch)
    return descend(state, clipped(gradient, norm_of(gradient))), loss


class Automodel3817(Handwritten):
    """The norm that clips omits the experts of other replicas"""

    project, number = "NVIDIA-NeMo/Automodel", "3817"
    also = "Megatron-LM #5916, #7452 finding 8"
    reference, state = staticmethod(one_device_clipped), staticmethod(experts)

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(state: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda s: dispatched(s, batch) / count)(state)
            router = jax.lax.psum(gradient["router"], "data")
            norm = norm_of((router, gradient["experts"]))  # its own are not 0
            own = clipped({"router": router, "experts": gradient["experts"]}, norm)
            own["experts"] = jax.lax.psum(own["experts"], "data")
            return descend(state, own), jax.lax.psum(loss, "data")

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(state: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda s: dispatched(s, batch) / count)(state)
            router = jax.lax.psum(gradient["router"], "data")
            squares = jax.lax.psum(norm_of(gradient["experts"]) ** 2, "data")
            norm = jnp.sqrt(norm_of(router) ** 2 + squares)
            own = clipped({"router": router, "experts": gradient["experts"]}, norm)
            own["experts"] = jax.lax.psum(own["experts"], "data")
            return descend(state, own), jax.lax.psum(loss, "data")

        return step


class DeepSpeed1801(Handwritten):
    """Weights that are on all ranks are clipped on the first one alone (BLOOM-176B)"""

    project, number = "deepspeedai/DeepSpeed", "1801"
    state = staticmethod(normed_heads)

    @staticmethod
    def reference(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            return scored(by_heads(state, batch, state["heads"]), batch) / tokens(batch)

        value, gradient = jax.value_and_grad(loss)(state)
        return descend(state, clipped(gradient, norm_of(gradient))), value

    @staticmethod
    def broken() -> Any:
        def step(state: Any, batch: Any) -> Any:
            count = tokens(batch)
            loss, gradient = jax.value_and_grad(lambda s: split_heads(s, batch) / count)(state)
            gradient = jax.lax.psum(gradient, "expert")
            small = clipped(gradient, norm_of(gradient))
            first = jax.lax.axis_index("expert") == 0
            small["norm"] = jnp.where(first, small["norm"], gradient["norm"])
            return descend(state, small), loss

        mesh = mesh_of((DEVICES,), ("expert",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )

    @staticmethod
    def mended() -> Any:
        def step(state: Any, batch: Any) -> Any:
            count = tokens(batch)
            loss, gradient = jax.value_and_grad(lambda s: split_heads(s, batch) / count)(state)
            gradient = jax.lax.psum(gradient, "expert")
            return descend(state, clipped(gradient, norm_of(gradient))), loss

        mesh = mesh_of((DEVICES,), ("expert",))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        )


def one_device_clipped_plain(w: Any, batch: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / tokens(batch))(w)
    return w - RATE * clipped(gradient, norm_of(gradient)), loss


class PyTorch170862(Handwritten):
    """Split gradients are clipped by the norm of a replica's own part"""

    project, number, also = "pytorch/pytorch", "170862", "torchtitan #766"
    state = staticmethod(lambda: normal(1, 4, 5))
    reference = staticmethod(one_device_clipped_plain)

    @staticmethod
    def batch() -> Any:
        labels = np.random.default_rng(2).integers(0, 5, (16, 4)).astype(np.int32)
        return {"x": normal(3, 16, 4, 4), "labels": labels}

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(total)(w, batch)
            count = jax.lax.psum(tokens(batch), "data")
            part = jax.lax.psum_scatter(gradient, "data", tiled=True) / count
            part = clipped(part, norm_of(part))
            whole = jax.lax.all_gather(part, "data", tiled=True)
            return w - RATE * whole, jax.lax.psum(loss, "data") / count

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(total)(w, batch)
            count = jax.lax.psum(tokens(batch), "data")
            part = jax.lax.psum_scatter(gradient, "data", tiled=True) / count
            norm = jnp.sqrt(jax.lax.psum(norm_of(part) ** 2, "data"))
            part = clipped(part, norm)
            whole = jax.lax.all_gather(part, "data", tiled=True)
            return w - RATE * whole, jax.lax.psum(loss, "data") / count

        return step


class Twinkle290(Handwritten):
    """The norm of a gradient that DDP has reduced is added up over the ranks once more"""

    project, number = "modelscope/twinkle", "290"
    reference = staticmethod(one_device_clipped_plain)

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(total)(w, batch)
            loss, gradient, count = jax.lax.psum((loss, gradient, tokens(batch)), "data")
            gradient = gradient / count
            norm = jnp.sqrt(jax.lax.psum(jnp.sum(gradient**2), "data"))
            return w - RATE * clipped(gradient, norm), loss / count

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(total)(w, batch)
            loss, gradient, count = jax.lax.psum((loss, gradient, tokens(batch)), "data")
            gradient = gradient / count
            norm = jnp.sqrt(jnp.sum(gradient**2))
            return w - RATE * clipped(gradient, norm), loss / count

        return step
