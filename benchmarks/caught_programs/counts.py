"""Tokens counted by part: means of means, and factors of the number of replicas."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from caught_programs.parts import (
    ACCUMULATING,
    IGNORED,
    IN_TWO,
    RATE,
    Handwritten,
    Loss,
    clipped,
    losses,
    mesh_of,
    micro_batches,
    norm_of,
    normal,
    tokens,
    total,
)
from jax.sharding import PartitionSpec as P

import replicax as rx

SCALE_FACTOR = 64.0


class TorchTitan1842(Loss):
    """The mean over the valid tokens of a rank and a micro-batch, averaged over both"""

    project, number, also = "pytorch/torchtitan", "1842", "2206"

    @staticmethod
    def broken(w: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(losses(w, batch), where=batch["labels"] != IGNORED)

    @staticmethod
    def mended(w: Any, batch: Any, key: Any) -> Any:
        return rx.Weighted(losses(w, batch), batch["labels"] != IGNORED)


class Speculators942(Loss):
    """A masked mean with an epsilon, per rank; its gradients are averaged"""

    project, number = "vllm-project/speculators", "942"

    @staticmethod
    def broken(w: Any, batch: Any, key: Any) -> Any:
        mask = (batch["labels"] != IGNORED).astype(jnp.float32)
        return jnp.sum(losses(w, batch) * mask) / (jnp.sum(mask) + 1e-6)

    @staticmethod
    def mended(w: Any, batch: Any, key: Any) -> Any:
        mask = (batch["labels"] != IGNORED).astype(jnp.float32)
        return rx.Weighted(losses(w, batch), mask)


class Transformers24725(Loss):
    """Each micro-batch's mean counts alike in the accumulated gradient, on one device too"""

    project, number, also = "huggingface/transformers", "24725", "34191"
    options = ACCUMULATING

    @staticmethod
    def broken(w: Any, batch: Any, key: Any) -> Any:
        return total(w, batch) / tokens(batch)

    @staticmethod
    def mended(w: Any, batch: Any, key: Any) -> Any:
        return rx.Weighted(losses(w, batch), batch["labels"] != IGNORED)


class PrimeRL2358(Handwritten):
    """Each rank divides by its own tokens, and the gradients are averaged"""

    project, number, also = "PrimeIntellect-ai/prime-rl", "2358", "2562"

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss_scale = jnp.maximum(tokens(batch), 1)
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / loss_scale)(w)
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss_scale = jnp.maximum(jax.lax.psum(tokens(batch), "data"), 1)
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / loss_scale)(w)
            loss, gradient = jax.lax.psum((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step


class PrimeRL1961(Handwritten):
    """`loss[mask].mean()` of each micro-batch of each rank, divided by the number of steps"""

    project, number, also = "PrimeIntellect-ai/prime-rl", "1961", "1957, 1960"
    options = IN_TWO

    @staticmethod
    def broken() -> Any:
        def mean_loss(w: Any, part: Any) -> Any:
            return jnp.mean(losses(w, part), where=part["labels"] != IGNORED) / 2

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(mean_loss)(w, part)
                loss, gradient = loss + value, gradient + slope
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(total)(w, part)
                loss, gradient = loss + value, gradient + slope
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.lax.psum((loss, gradient), "data")
            return w - RATE * gradient / count, loss / count

        return step


class Verl5625(Handwritten):
    """A micro-batch's mean over its tokens, weighted by its share of the samples"""

    project, number = "verl-project/verl", "5625"
    options = IN_TWO

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                share = len(part["x"]) / len(batch["x"])
                value, slope = jax.value_and_grad(
                    lambda w, part=part, share=share: total(w, part) / tokens(part) * share
                )(w)
                loss, gradient = loss + value, gradient + slope
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(
                    lambda w, part=part: total(w, part) / count * jax.lax.axis_size("data")
                )(w)
                loss, gradient = loss + value, gradient + slope
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step


class Verl5366(Handwritten):
    """A sum divided by a constant is taken for free of the number of ranks; FSDP averages it"""

    project, number = "verl-project/verl", "5366"

    @staticmethod
    def reference(w: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / SCALE_FACTOR)(w)
        return w - RATE * gradient, loss

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / SCALE_FACTOR)(w)
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            scale = jax.lax.axis_size("data") / SCALE_FACTOR
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) * scale)(w)
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step


class Transformers34242(Handwritten):
    """The tokens of all micro-batches are counted, but only those of this device"""

    project, number, also = "huggingface/transformers", "34242", "39392"
    options = IN_TWO

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            items = sum(tokens(part) for part in micro_batches(batch))
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(lambda w, part=part: total(w, part) / items)(w)
                loss, gradient = loss + value, gradient + slope
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            items = jax.lax.psum(sum(tokens(part) for part in micro_batches(batch)), "data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(lambda w, part=part: total(w, part) / items)(w)
                loss, gradient = loss + value, gradient + slope
            loss, gradient = jax.lax.psum((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step


class Transformers37474(Handwritten):
    """Each device's loss is divided by the tokens of all devices, then the mean over devices"""

    project, number, also = "huggingface/transformers", "37474", "verl-SpeCo #29"

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            items = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / items)(w)
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            items = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / items)(w)
            loss, gradient = jax.lax.psum((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step


class TorchTitan2318(Handwritten):
    """Divided by all tokens for FSDP, which adds; DDP averages: its norm is N times smaller"""

    project, number = "pytorch/torchtitan", "2318"

    @staticmethod
    def reference(w: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / tokens(batch))(w)
        return w - RATE * clipped(gradient, norm_of(gradient)), loss

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="replicate")
        def step(w: Any, batch: Any) -> Any:
            global_valid_tokens = jax.lax.psum(tokens(batch), "replicate")
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / global_valid_tokens)(w)
            gradient = jax.lax.pmean(gradient, "replicate")
            gradient = clipped(gradient, norm_of(gradient))
            return w - RATE * gradient, jax.lax.psum(loss, "replicate")

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="replicate")
        def step(w: Any, batch: Any) -> Any:
            global_valid_tokens = jax.lax.psum(tokens(batch), "replicate")
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / global_valid_tokens)(w)
            gradient = jax.lax.psum(gradient, "replicate")
            gradient = clipped(gradient, norm_of(gradient))
            return w - RATE * gradient, jax.lax.psum(loss, "replicate")

        return step


class Miles3231(Handwritten):
    """The number of tokens is returned beside the sum of losses, and nothing divides by it"""

    project, number = "radixark/miles", "3231"

    @staticmethod
    def broken() -> Any:
        def with_normalizer(w: Any, batch: Any) -> Any:
            return total(w, batch), tokens(batch)

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            (loss, _), gradient = jax.value_and_grad(with_normalizer, has_aux=True)(w, batch)
            loss, gradient = jax.lax.pmean((loss, gradient), "data")
            return w - RATE * gradient, loss

        return step

    @staticmethod
    def mended() -> Any:
        def with_normalizer(w: Any, batch: Any) -> Any:
            return total(w, batch), tokens(batch)

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            (loss, count), gradient = jax.value_and_grad(with_normalizer, has_aux=True)(w, batch)
            loss, gradient, count = jax.lax.psum((loss, gradient, count), "data")
            return w - RATE * gradient / count, loss / count

        return step


class Megatron673(Handwritten):
    """Sums of tokens are multiplied by the context-parallel size, as means would have to be"""

    project, number, also = "NVIDIA/Megatron-LM", "673", "906"

    @staticmethod
    def broken() -> Any:
        def step(w: Any, batch: Any) -> Any:
            scale = jax.lax.axis_size("context")
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) * scale)(w)
            loss, gradient, count = jax.lax.psum(
                (loss, gradient, tokens(batch)), ("data", "context")
            )
            return w - RATE * gradient / count, loss / count

        mesh = mesh_of((2, 2), ("data", "context"))
        split = (P(), P(("data", "context")))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False)
        )

    @staticmethod
    def mended() -> Any:
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(total)(w, batch)
            loss, gradient, count = jax.lax.psum(
                (loss, gradient, tokens(batch)), ("data", "context")
            )
            return w - RATE * gradient / count, loss / count

        mesh = mesh_of((2, 2), ("data", "context"))
        split = (P(), P(("data", "context")))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False)
        )


def next_but_one(batch: Any) -> Any:
    """Return the batch of a second head, which predicts one token further and has fewer."""
    later = jnp.roll(batch["labels"], -1, 1).at[:, -1].set(IGNORED)
    return {"x": batch["x"], "labels": later}


def two_heads() -> Any:
    return {"main": normal(1, 3, 5), "further": normal(4, 3, 5)}


class Megatron7452Tokens(Handwritten):
    """A second head's loss is normalized by the tokens of this rank: 14/3 for 4"""

    project, number = "NVIDIA/Megatron-LM", "7452, finding 3"
    state = staticmethod(two_heads)

    @staticmethod
    def reference(heads: Any, batch: Any) -> Any:
        further = next_but_one(batch)

        def loss(heads: Any) -> Any:
            main = total(heads["main"], batch) / tokens(batch)
            return main + total(heads["further"], further) / tokens(further)

        value, gradient = jax.value_and_grad(loss)(heads)
        return jax.tree.map(lambda w, slope: w - RATE * slope, heads, gradient), value

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(heads: Any, batch: Any) -> Any:
            further = next_but_one(batch)
            ratio = tokens(batch) / jnp.maximum(tokens(further), 1)

            def loss(heads: Any) -> Any:
                return total(heads["main"], batch) + ratio * total(heads["further"], further)

            value, gradient = jax.value_and_grad(loss)(heads)
            value, gradient, count = jax.lax.psum((value, gradient, tokens(batch)), "data")
            after = jax.tree.map(lambda w, slope: w - RATE * slope / count, heads, gradient)
            return after, value / count

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(heads: Any, batch: Any) -> Any:
            further = next_but_one(batch)
            count, fewer = jax.lax.psum((tokens(batch), tokens(further)), "data")

            def loss(heads: Any) -> Any:
                return total(heads["main"], batch) + count / fewer * total(
                    heads["further"], further
                )

            value, gradient = jax.value_and_grad(loss)(heads)
            value, gradient = jax.lax.psum((value, gradient), "data")
            after = jax.tree.map(lambda w, slope: w - RATE * slope / count, heads, gradient)
            return after, value / count

        return step


class MegatronBridge6103(Loss):
    """The second head's loss counts padding, as no mask is passed on"""

    project, number, also = "NVIDIA-NeMo/Megatron-Bridge", "6103", "ms-swift #8192"
    model = staticmethod(two_heads)

    @staticmethod
    def broken(heads: Any, batch: Any, key: Any) -> Any:
        later = jnp.maximum(jnp.roll(batch["labels"], -1, 1), 0)
        logits = batch["x"] @ heads["further"]
        further = optax.softmax_cross_entropy_with_integer_labels(logits, later)
        return rx.Weighted(losses(heads["main"], batch) + further, batch["labels"] != IGNORED)

    @staticmethod
    def mended(heads: Any, batch: Any, key: Any) -> Any:
        further = losses(heads["further"], next_but_one(batch))
        return rx.Weighted(losses(heads["main"], batch) + further, batch["labels"] != IGNORED)
