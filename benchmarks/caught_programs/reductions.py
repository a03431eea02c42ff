"""Gradients that are never reduced, too early, in another group, or more than once."""

import copy
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from caught_programs.parts import (
    IN_FOUR,
    IN_TWO,
    RATE,
    Handwritten,
    mesh_of,
    micro_batches,
    tokens,
    total,
)
from jax.sharding import PartitionSpec as P


class Megatron1685(Handwritten):
    """The example's loop has no finalize_model_grads, so nothing is reduced"""

    project, number = "NVIDIA/Megatron-LM", "1685"

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def train_step(w: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda w: total(w, batch) / tokens(batch))(w)
            return jax.tree.map(lambda w, g: w - RATE * g, w, grads), loss

        return train_step

    @staticmethod
    def mended() -> Any:
        def finalize_model_grads(grads: Any, count: Any) -> Any:
            grads, count = jax.lax.psum((grads, count), "data")
            return jax.tree.map(lambda g: g / count, grads)

        @partial(jax.pmap, axis_name="data")
        def train_step(w: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(total)(w, batch)
            grads = finalize_model_grads(grads, tokens(batch))
            loss = finalize_model_grads(loss, tokens(batch))
            return jax.tree.map(lambda w, g: w - RATE * g, w, grads), loss

        return train_step


def add_up(grads: Any, count: Any) -> Any:
    grads, count = jax.lax.psum((grads, count), "data")
    return jax.tree.map(lambda g: g / count, grads)


class MegatronBridge6067(Handwritten):
    """The reduction is installed on a configuration of which the model has a copy"""

    project, number, also = "NVIDIA-NeMo/Megatron-Bridge", "6067", "NeMo-RL #3789"

    @staticmethod
    def broken() -> Any:
        provider = types.SimpleNamespace(finalize_model_grads=None)
        model = types.SimpleNamespace(config=copy.deepcopy(provider))
        provider.finalize_model_grads = add_up

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(total)(w, batch)
            if model.config.finalize_model_grads is not None:
                gradient = model.config.finalize_model_grads(gradient, tokens(batch))
            return w - RATE * gradient, add_up(loss, tokens(batch))

        return step

    @staticmethod
    def mended() -> Any:
        provider = types.SimpleNamespace(finalize_model_grads=None)
        model = types.SimpleNamespace(config=copy.deepcopy(provider))
        model.config.finalize_model_grads = add_up

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            loss, gradient = jax.value_and_grad(total)(w, batch)
            if model.config.finalize_model_grads is not None:
                gradient = model.config.finalize_model_grads(gradient, tokens(batch))
            return w - RATE * gradient, add_up(loss, tokens(batch))

        return step


@jax.custom_vjp
def reduced_backward(w: Any) -> Any:
    return w


reduced_backward.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.psum(g, "data"),))


class DistributedDataParallel:
    """A wrapper that reduces in the backward pass of its own forward pass, and only there."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, w: Any, batch: Any) -> Any:
        return self.module(reduced_backward(w), batch)


class OpenTSLM49(Handwritten):
    """The loss is computed by `model.module`, so the wrapper's reduction never runs"""

    project, number = "OpenTSLM/OpenTSLM", "49"
    also = "RAE #40, minimind #853"

    @staticmethod
    def broken() -> Any:
        model = DistributedDataParallel(total)

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda w: model.module(w, batch) / count)(w)
            return w - RATE * gradient, jax.lax.psum(loss, "data")

        return step

    @staticmethod
    def mended() -> Any:
        model = DistributedDataParallel(total)

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda w: model(w, batch) / count)(w)
            return w - RATE * gradient, jax.lax.psum(loss, "data")

        return step


class Jxmnop(Handwritten):
    """A trainer's method returns the wrapped model in one place, the raw one in another"""

    project, number = "x.com/jxmnop", "1778520637193240892"

    @staticmethod
    def broken() -> Any:
        raw, wrapped = total, DistributedDataParallel(total)

        def model(training: bool) -> Any:
            return raw if training else wrapped

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            forward = model(training=True)
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda w: forward(w, batch) / count)(w)
            return w - RATE * gradient, jax.lax.psum(loss, "data")

        return step

    @staticmethod
    def mended() -> Any:
        wrapped = DistributedDataParallel(total)

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = jax.value_and_grad(lambda w: wrapped(w, batch) / count)(w)
            return w - RATE * gradient, jax.lax.psum(loss, "data")

        return step


class VeOmni1059(Handwritten):
    """Reduced over the data axis, of size 1, where the rows are split over another one"""

    project, number, also = "ByteDance-Seed/VeOmni", "1059", "1115, 1086"

    @staticmethod
    def broken() -> Any:
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), ("data", "sequence"))
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / count)(w)
            gradient = jax.lax.psum(gradient, "data")
            return w - RATE * gradient, jax.lax.psum(loss, ("data", "sequence"))

        mesh = mesh_of((1, 4), ("data", "sequence"))
        split = (P(), P(("data", "sequence")))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False)
        )

    @staticmethod
    def mended() -> Any:
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), ("data", "sequence"))
            loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / count)(w)
            gradient = jax.lax.psum(gradient, ("data", "sequence"))
            return w - RATE * gradient, jax.lax.psum(loss, ("data", "sequence"))

        mesh = mesh_of((1, 4), ("data", "sequence"))
        split = (P(), P(("data", "sequence")))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False)
        )


class FunASR3472(Handwritten):
    """`no_sync` is off by one: the first micro-batch is reduced, the last is not"""

    project, number = "modelscope/FunASR", "3472"
    options = IN_TWO

    @staticmethod
    def broken() -> Any:
        accum_grad = 2

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for batch_idx, part in enumerate(micro_batches(batch, accum_grad)):
                value, slope = jax.value_and_grad(total)(w, part)
                loss, gradient = loss + value, gradient + slope
                if batch_idx % accum_grad == 0:
                    gradient = jax.lax.psum(gradient, "data")
            return w - RATE * gradient / count, jax.lax.psum(loss, "data") / count

        return step

    @staticmethod
    def mended() -> Any:
        accum_grad = 2

        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for batch_idx, part in enumerate(micro_batches(batch, accum_grad)):
                value, slope = jax.value_and_grad(total)(w, part)
                loss, gradient = loss + value, gradient + slope
                if (batch_idx + 1) % accum_grad == 0:
                    gradient = jax.lax.psum(gradient, "data")
            return w - RATE * gradient / count, jax.lax.psum(loss, "data") / count

        return step


class TorchRec4758(Handwritten):
    """The last forward pass arms the reduction, which the first backward pass after it takes"""

    project, number = "meta-pytorch/torchrec", "4758"
    options = IN_FOUR

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            parts, waiting, armed = micro_batches(batch, 4), [], False
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for order in ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"):
                number = int(order[1])
                if order[0] == "F":
                    value, backward = jax.vjp(lambda w, n=number: total(w, parts[n]), w)
                    loss, armed = loss + value, number == 3
                    waiting.append(backward)
                else:
                    gradient = gradient + waiting[number](jnp.float32(1))[0]
                    if armed:
                        gradient, armed = jax.lax.psum(gradient, "data"), False
            return w - RATE * gradient / count, jax.lax.psum(loss, "data") / count

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            parts, waiting = micro_batches(batch, 4), []
            count = jax.lax.psum(tokens(batch), "data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for order in ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"):
                number = int(order[1])
                if order[0] == "F":
                    value, backward = jax.vjp(lambda w, n=number: total(w, parts[n]), w)
                    loss = loss + value
                    waiting.append(backward)
                else:
                    gradient = gradient + waiting[number](jnp.float32(1))[0]
            gradient = jax.lax.psum(gradient, "data")
            return w - RATE * gradient / count, jax.lax.psum(loss, "data") / count

        return step


class Megatron6660(Handwritten):
    """In a group of one the reduced bucket is the buffer itself: each micro-batch doubles it"""

    project, number = "NVIDIA/Megatron-LM", "6660"
    options = IN_TWO

    @staticmethod
    def broken() -> Any:
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), ("expert", "data"))
            loss, buffer = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(total)(w, part)
                loss = loss + value
                if jax.lax.axis_size("data") == 1:  # no bucket of its own: it is the buffer
                    buffer = buffer + slope
                    buffer = buffer + buffer
                else:
                    buffer = buffer + jax.lax.psum(slope, "data")
            gradient = jax.lax.psum(buffer, "expert") / count
            return w - RATE * gradient, jax.lax.psum(loss, ("expert", "data")) / count

        mesh = mesh_of((4, 1), ("expert", "data"))
        split = (P(), P(("expert", "data")))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False)
        )

    @staticmethod
    def mended() -> Any:
        def step(w: Any, batch: Any) -> Any:
            count = jax.lax.psum(tokens(batch), ("expert", "data"))
            loss, buffer = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(total)(w, part)
                loss, buffer = loss + value, buffer + jax.lax.psum(slope, "data")
            gradient = jax.lax.psum(buffer, "expert") / count
            return w - RATE * gradient, jax.lax.psum(loss, ("expert", "data")) / count

        mesh = mesh_of((4, 1), ("expert", "data"))
        split = (P(), P(("expert", "data")))
        return jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False)
        )


class Megatron3023(Handwritten):
    """What is accumulated is divided again with each micro-batch, and the last is not"""

    project, number = "NVIDIA/Megatron-LM", "3023"
    options = IN_TWO

    @staticmethod
    def reference(w: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: total(w, batch) / len(batch["x"]))(w)
        return w - RATE * gradient, loss

    @staticmethod
    def broken() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            scaling = 1 / jax.lax.axis_size("data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(lambda w, p=part: total(w, p) / len(p["x"]) / 2)(
                    w
                )
                loss = loss + value
                gradient = gradient * scaling + jax.lax.psum(slope, "data")
            return w - RATE * gradient, jax.lax.pmean(loss, "data")

        return step

    @staticmethod
    def mended() -> Any:
        @partial(jax.pmap, axis_name="data")
        def step(w: Any, batch: Any) -> Any:
            scaling = 1 / jax.lax.axis_size("data")
            loss, gradient = 0.0, jnp.zeros_like(w)
            for part in micro_batches(batch):
                value, slope = jax.value_and_grad(lambda w, p=part: total(w, p) / len(p["x"]) / 2)(
                    w
                )
                loss = loss + value
                gradient = gradient + jax.lax.psum(slope * scaling, "data")
            return w - RATE * gradient, jax.lax.pmean(loss, "data")

        return step
