"""When a step's transfers can start and are needed, by the schedules that systems document.

A schedule that was compiled is read from the program instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replicax.plan.forecast import Transfer
from replicax.plan.network import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, DeviceNetwork

BACKWARD = 2.0
"""Time of a layer's backward pass over its forward pass: the gradients of its input and of its
weights cost as many FLOPs each as the output did (Kaplan et al. 2020, arXiv:2001.08361, 2.1)."""


@dataclass(frozen=True)
class Layer:
    """A part of a model whose gradient is complete at once."""

    parameters: int
    forward_flops: float
    """On any scale: only the layers' shares count."""


@dataclass(frozen=True)
class Timeline:
    """When each layer runs in a step: forward first to last, backward last to first.

    Args:
        layers: from first to last.
        compute_seconds: of the step, which the layers share by their FLOPs.
        recomputed: whether the backward pass runs the forward pass again (full rematerialization).
    """

    layers: Sequence[Layer]
    compute_seconds: float
    recomputed: bool = False

    @property
    def _unit(self) -> float:
        """Seconds of a forward FLOP."""
        flops = sum(layer.forward_flops for layer in self.layers)
        return self.compute_seconds / (flops * (1 + self._backward))

    @property
    def _backward(self) -> float:
        return BACKWARD + self.recomputed

    def forward(self) -> list[tuple[float, float]]:
        """Start and end of each layer's forward pass, first to last, in seconds."""
        spans, now = [], 0.0
        for layer in self.layers:
            start, now = now, now + layer.forward_flops * self._unit
            spans.append((start, now))
        return spans

    def backward(self) -> list[tuple[float, float]]:
        """Start and end of each layer's backward pass, first layer to last, in seconds."""
        spans, now = [], self.compute_seconds
        for layer in self.layers:
            end, now = now, now - layer.forward_flops * self._unit * self._backward
            spans.append((max(now, 0.0), end))
        return spans


def bucketed(timeline: Timeline, bucket_bytes: float, parameter_bytes: float) -> list[Transfer]:
    """All-reduces of gradients in buckets, filled in the order of the backward pass.

    A bucket is sent once it holds `bucket_bytes` or more (PyTorch DDP, arXiv:2006.15704; XLA's
    all-reduce combiner by its threshold), the last with what is left; the optimizer needs all.

    Args:
        timeline: of the layers.
        bucket_bytes: at which a bucket is sent.
        parameter_bytes: of the gradient of one parameter, on one device.
    """
    transfers, held = [], 0.0
    spans = timeline.backward()
    for layer, (_, ready) in reversed(list(zip(timeline.layers, spans, strict=True))):
        held += layer.parameters * parameter_bytes
        if held >= bucket_bytes:
            transfers.append(Transfer(ALL_REDUCE, held, ready, timeline.compute_seconds))
            held = 0.0
    if held:
        end = timeline.compute_seconds
        transfers.append(Transfer(ALL_REDUCE, held, end, end))
    return transfers


def fused(
    timeline: Timeline, buffer_bytes: float, parameter_bytes: float, network: DeviceNetwork
) -> list[Transfer]:
    """All-reduces of whatever gradients are ready when the network is free, at most a buffer full.

    Horovod's tensor fusion (docs/tensor-fusion.rst in horovod/horovod); a tensor larger than the
    buffer goes alone.
    """
    spans = timeline.backward()
    queue = [
        (ready, layer.parameters * parameter_bytes)
        for layer, (_, ready) in reversed(list(zip(timeline.layers, spans, strict=True)))
        if layer.parameters
    ]
    transfers, free, end = [], 0.0, timeline.compute_seconds
    while queue:
        ready, held = queue.pop(0)
        start = max(free, ready)
        while queue and queue[0][0] <= start and held + queue[0][1] <= buffer_bytes:
            held += queue.pop(0)[1]
        transfers.append(Transfer(ALL_REDUCE, held, min(start, end), end))
        free = start + network.time(ALL_REDUCE, held)
    return transfers


def sharded(
    timeline: Timeline, devices: int, gather_bytes: float, reduce_bytes: float
) -> list[Transfer]:
    """The transfers of fully sharded parameters: a layer's are gathered while the layer before it
    computes, in the forward pass and again in the backward pass; its gradient is reduced and
    scattered while the layer after it computes (Zhao et al. 2023, arXiv:2304.11277).

    Args:
        timeline: of the layers.
        devices: over which parameters are sharded.
        gather_bytes: of one parameter where it is gathered.
        reduce_bytes: of the gradient of one parameter where it is reduced.
    """
    transfers = []
    end, before = timeline.compute_seconds, 0.0
    for layer, (start, _) in zip(timeline.layers, timeline.forward(), strict=True):
        size = layer.parameters * gather_bytes
        transfers.append(Transfer(ALL_GATHER, size, before, start))
        before = start
    before = timeline.forward()[-1][0]
    for layer, (start, done) in reversed(
        list(zip(timeline.layers, timeline.backward(), strict=True))
    ):
        # The last layer is still gathered from the forward pass.
        if layer is not timeline.layers[-1]:
            size = layer.parameters * gather_bytes
            transfers.append(Transfer(ALL_GATHER, size, min(before, start), start))
        before = start
        size = layer.parameters * reduce_bytes / devices
        transfers.append(Transfer(REDUCE_SCATTER, size, done, end))
    return transfers
