"""A TPU slice: a torus or mesh of links; several slices over the data-centre network."""

import math
from dataclasses import dataclass

from replicax.plan.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    NOTHING_SENT,
    REDUCE_SCATTER,
    CollectiveTime,
    Network,
    check,
)
from replicax.plan.host_network import HostNetwork

TORUS = "torus"


@dataclass(frozen=True)
class TorusNetwork:
    """Devices on a grid, each linked to its neighbours along every dimension.

    Data goes both ways along all dimensions at once (the multi-dimensional rings of Jain and
    Sabharwal 2010), so that a gather is as fast as the links through which one device receives it:
    two for each dimension that closes into a ring, one at the end of a line. An all-to-all is bound
    by the middle of the longest dimension. The jax-ml/scaling-book (sharding.md) gives the same
    times for rings.

    Args:
        shape: devices along each dimension.
        rings: of each dimension, whether it closes.
        link_bytes_per_second: of one link, in one direction.
        latency_seconds: of one hop.
    """

    shape: tuple[int, ...]
    rings: tuple[bool, ...]
    link_bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.rings) or min(self.shape, default=0) < 1:
            raise ValueError(f"a torus of shape {self.shape} with rings {self.rings}")

    @property
    def devices(self) -> int:
        """How many take part."""
        return math.prod(self.shape)

    @property
    def bytes_per_second(self) -> float:
        """At which every device receives a gathered array."""
        links = sum(
            2 if ring else 1 for size, ring in zip(self.shape, self.rings, strict=True) if size > 1
        )
        return links * self.link_bytes_per_second

    def time(self, kind: str, size: float) -> CollectiveTime:
        """One collective; see `Network`."""
        check(kind, size)
        n = self.devices
        if n == 1 or size == 0:
            return NOTHING_SENT
        latency = self.latency_seconds * sum(each - 1 for each in self.shape)
        once = (n - 1) / n * size / self.bytes_per_second + latency
        seconds = {
            ALL_REDUCE: 2 * once,
            ALL_GATHER: once,
            REDUCE_SCATTER: (n - 1) * size / self.bytes_per_second + latency,
            BROADCAST: size / self.bytes_per_second + latency,
            ALL_TO_ALL: self._all_to_all(size) + latency,
        }.get(kind)
        if seconds is None:
            neighbour = size / self.link_bytes_per_second + self.latency_seconds
            return CollectiveTime(neighbour, "direct")
        return CollectiveTime(seconds, TORUS)

    def _all_to_all(self, size: float) -> float:
        """Seconds at the busiest links.

        Along a ring of k, data travels k/4 hops on average, over two links of each device; of what
        starts on one side of a line, half crosses its middle.
        """
        return max(
            size * length / (8 if ring else 4) / self.link_bytes_per_second
            for length, ring in zip(self.shape, self.rings, strict=True)
            if length > 1
        )


@dataclass(frozen=True)
class SliceNetwork:
    """Several equal slices: collectives go inside a slice first, then between slices with what is
    left on each device, each device by its own share of the data-centre network.

    Args:
        inside: of one slice.
        between: one device of each slice, as hosts of one device.
    """

    inside: Network
    between: HostNetwork

    @property
    def devices(self) -> int:
        """How many take part."""
        return self.inside.devices * self.between.devices

    def time(self, kind: str, size: float) -> CollectiveTime:
        """One collective; see `Network`."""
        check(kind, size)
        share = size / self.inside.devices
        slices = self.between.devices
        if kind == ALL_REDUCE:
            across = self.between.time(kind, share)
            near = self.inside.time(REDUCE_SCATTER, share).seconds
            near += self.inside.time(ALL_GATHER, size).seconds
        elif kind in (ALL_GATHER, BROADCAST):
            across, near = self.between.time(kind, share), self.inside.time(kind, size).seconds
        elif kind == REDUCE_SCATTER:
            across = self.between.time(kind, size)
            near = self.inside.time(kind, size * slices).seconds
        elif kind == ALL_TO_ALL:
            across, near = self.between.time(kind, size), self.inside.time(kind, size).seconds
        else:
            across = self.between.time(kind, size)
            near = 0.0 if slices > 1 else self.inside.time(kind, size).seconds
        return CollectiveTime(near + across.seconds, f"{TORUS} and {across.algorithm}")
