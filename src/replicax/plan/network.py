"""Network models of a target: the time of a collective among all or some of its devices."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from replicax.analysis.hardware import Interconnect
from replicax.core.placement.mesh import AnyMesh, in_order
from replicax.errors import ConfigError
from replicax.plan.target import Target, host_bounds

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"
BROADCAST = "collective-broadcast"


class DeviceNetwork(Protocol):
    """The links between the devices of a collective."""

    @property
    def devices(self) -> int:
        """The number of participating devices."""
        ...

    def time(self, kind: str, size: float) -> float:
        """Return the seconds of one of `analysis.compiled.COLLECTIVES` on an idle network.

        `size` is the bytes of the result on one device: the gathered array of an all-gather, the
        shard of a reduce-scatter.
        """
        ...


def _along_links(kind: str, size: float, devices: int, rate: float, latency: float) -> float:
    """Return the seconds of a collective whose devices all send and receive at `rate`."""
    passed = {
        ALL_REDUCE: 2 * (devices - 1) / devices * size,
        ALL_GATHER: (devices - 1) / devices * size,
        REDUCE_SCATTER: (devices - 1) * size,
        BROADCAST: size,
    }
    return passed[kind] / rate + (2 if kind == ALL_REDUCE else 1) * latency


RING, TREE = "ring", "tree"
LINE_RATE_SHARE = 0.96
"""Share of a network card's line rate available to a collective: NCCL assumes 12.0 GB/s for 100
Gbit/s (`NET_BW` in NVIDIA/nccl src/graph/topo.h). The rest is headers."""
_FREE = Interconnect(math.inf, 0.0, "nothing goes over it")


@dataclass(frozen=True)
class HostNetwork:
    """Hosts with equally many participating devices, connected as NCCL connects them.

    One ring passes through all devices and leaves each host once, on enough channels to use every
    card of the host, so a collective is as fast as the slower of the link inside a host and its
    cards combined. The tree of an all-reduce is a chain inside a host and a double binary tree
    between hosts, in which each device sends and receives every byte twice (once up and once down).
    The faster of the two algorithms is used.

    Times follow the α-β model (Hockney 1994): ring and pairwise exchange from Thakur, Rabenseifner
    and Gropp, "Optimization of collective communication operations in MPICH" (2005); double binary
    trees from Sanders, Speck and Träff (2009); latency per step inside and between hosts as in
    NVIDIA/nccl src/graph/tuning.cc.
    """

    inside: Interconnect | None
    """Link of one device in its host; None if only one device per host participates."""
    between: Interconnect | None
    """One device's share of its host's network cards; None if there is only one host."""
    devices_per_host: int
    hosts: int = 1
    algorithms: tuple[str, ...] = (RING, TREE)
    """Algorithms available for an all-reduce."""

    @property
    def devices(self) -> int:
        """The number of participating devices."""
        return self.hosts * self.devices_per_host

    def time(self, kind: str, size: float) -> float:
        """Return the seconds of one collective; see `DeviceNetwork`."""
        devices, hosts, each = self.devices, self.hosts, self.devices_per_host
        if devices == 1 or size == 0:
            return 0.0
        inside = self.inside if self.inside and each > 1 else _FREE
        between = self.between if self.between and hosts > 1 else _FREE
        card = LINE_RATE_SHARE * between.bytes_per_second
        near, far = inside.latency_seconds, between.latency_seconds
        if kind == PERMUTE:  # one message from each device
            link, latency = (card, far) if hosts > 1 else (inside.bytes_per_second, near)
            return size / link + latency
        if kind == ALL_TO_ALL:  # 1/n to every other device; both kinds of link work in parallel
            part = size / devices
            return max(
                (each - 1) * (near + part / inside.bytes_per_second),
                (devices - each) * (far + part / card),
            )
        rate = min(inside.bytes_per_second, card * each)
        # Of the n - 1 steps of a ring, hosts - 1 cross to another host.
        latency = (devices - hosts) * near + (hosts - 1) * far
        times = {RING: _along_links(kind, size, devices, rate, latency)}
        if kind == ALL_REDUCE:  # up and down the chain of a host and the tree of hosts
            latency = (each - 1) * near + math.ceil(math.log2(hosts)) * far
            times = {**times, TREE: 2 * size / rate + 2 * latency}
            return min(times[algorithm] for algorithm in self.algorithms)
        return times[RING]


@dataclass(frozen=True)
class TorusNetwork:
    """Devices on a grid, each linked to its neighbours along every dimension.

    Data moves both ways along all dimensions in parallel (the multi-dimensional rings of Jain and
    Sabharwal 2010), so a gather is bound by the links through which one device receives it: two for
    each dimension that closes into a ring, one at the end of a line. An all-to-all is bound by the
    middle of the longest dimension. The jax-ml/scaling-book (sharding.md) gives the same times for
    rings.
    """

    shape: tuple[int, ...]
    rings: tuple[bool, ...]
    """Whether each dimension closes into a ring."""
    link_bytes_per_second: float
    """Rate of one link, in one direction."""
    latency_seconds: float
    """Latency of one hop."""

    @property
    def devices(self) -> int:
        """The number of participating devices."""
        return math.prod(self.shape)

    def time(self, kind: str, size: float) -> float:
        """Return the seconds of one collective; see `DeviceNetwork`."""
        if self.devices == 1 or size == 0:
            return 0.0
        link = self.link_bytes_per_second
        if kind == PERMUTE:
            return size / link + self.latency_seconds
        latency = self.latency_seconds * sum(length - 1 for length in self.shape)
        dims = [each for each in zip(self.shape, self.rings, strict=True) if each[0] > 1]
        if kind == ALL_TO_ALL:
            # On a ring of k, data travels k/4 hops on average over two links per device; on a line,
            # half of the data from one side crosses the middle.
            return max(size * k / (8 if ring else 4) / link for k, ring in dims) + latency
        rate = link * sum(2 if ring else 1 for _, ring in dims)
        return _along_links(kind, size, self.devices, rate, latency)


@dataclass(frozen=True)
class SliceNetwork:
    """Several equal slices: a collective runs inside each slice, then its shards between slices,
    where each device uses its own share of the data-center network.
    """

    inside: DeviceNetwork
    between: HostNetwork
    """One device of each slice, modeled as hosts with one device each."""

    @property
    def devices(self) -> int:
        """The number of participating devices."""
        return self.inside.devices * self.between.devices

    def time(self, kind: str, size: float) -> float:
        """Return the seconds of one collective; see `DeviceNetwork`."""
        share, slices = size / self.inside.devices, self.between.devices
        if kind == ALL_REDUCE:
            near = self.inside.time(REDUCE_SCATTER, share) + self.inside.time(ALL_GATHER, size)
        elif kind == REDUCE_SCATTER:
            near = self.inside.time(kind, size * slices)
        elif kind == PERMUTE and slices > 1:
            near = 0.0
        else:
            near = self.inside.time(kind, size)
        gathers = kind in (ALL_REDUCE, ALL_GATHER, BROADCAST)
        return near + self.between.time(kind, share if gathers else size)


Networks = Callable[[tuple[str, ...] | None], DeviceNetwork]
"""Maps the mesh axes of a collective, or None for all of them, to the network of a group."""


def networks(target: Target, mesh: AnyMesh) -> Networks:
    """Return the network of a target by axes of a mesh of its devices; see `network`."""
    devices = in_order(range(target.devices), mesh.shape)

    @cache
    def over(axes: tuple[str, ...] | None) -> DeviceNetwork:
        if axes is None:
            return network(target)
        members = devices[tuple(slice(None) if axis in axes else 0 for axis in mesh.shape)]
        return network(target, members=sorted(members.reshape(-1).tolist()))

    return over


def network(target: Target, members: Sequence[int] | None = None) -> DeviceNetwork:
    """Return the network of all devices of a target, or of one of several groups that run at once.

    GPUs are connected inside a host and by the hosts' network cards (`HostNetwork`), TPUs by the
    torus of their slice (`TorusNetwork`) and, between slices, by the data-center network
    (`SliceNetwork`). `members` are the indices of the group's devices, in host order.

    Raises:
        ConfigError: the links of this hardware are unknown.
    """
    group = range(target.devices) if members is None else members
    if len(group) == 1:
        return HostNetwork(None, None, 1)
    inside, between = target.chip.inside, target.chip.between
    if target.topology is None:
        hosts = len({device // target.devices_per_host for device in group})
        each = len(group) // hosts
        return HostNetwork(
            _known(inside, target) if each > 1 else None,
            _known(between, target) if hosts > 1 else None,
            each,
            hosts,
        )
    slices = len({device * target.slices // target.devices for device in group})
    torus = _torus(target, group[: len(group) // slices])
    if slices == 1:
        return torus
    return SliceNetwork(torus, HostNetwork(None, _known(between, target), 1, slices))


def _torus(target: Target, group: Sequence[int]) -> TorusNetwork:
    """Return the part of a slice's torus that a group occupies.

    A group whose devices are not neighbours shares the links between them with other groups, and a
    group that is not a box is modeled as a line.
    """
    assert target.topology is not None
    link = _known(target.chip.inside, target)
    rate = link.bytes_per_second / (2 * target.chip.torus_dims)
    places = coordinates(target.topology)[np.asarray(group)]
    rows = [sorted(set(along.tolist())) for along in places.T]
    shape = tuple(len(row) for row in rows)
    if math.prod(shape) != len(group):
        return TorusNetwork((len(group),), (False,), rate, link.latency_seconds)
    hops = [row[1] - row[0] if len(row) > 1 else 1 for row in rows]
    sizes = (length * hop for length, hop in zip(shape, hops, strict=True))
    rings = tuple(
        ring and reached == size
        for ring, reached, size in zip(target.rings, sizes, target.topology, strict=True)
    )
    apart = max(hops)
    return TorusNetwork(shape, rings, rate / apart, link.latency_seconds * apart)


def coordinates(topology: tuple[int, ...]) -> np.ndarray:
    """Return the coordinates `[devices, dims]` of a slice's devices, in process order.

    Processes, and the devices of each, are numbered along the first dimension first.
    """
    dims = len(topology)
    host = tuple(min(pair) for pair in zip(host_bounds(topology), topology, strict=False))
    hosts = tuple(size // own for size, own in zip(topology, host, strict=True))
    blocks = np.indices(hosts[::-1]).reshape(dims, -1)[::-1].T * np.asarray(host)
    inside = np.indices(host[::-1]).reshape(dims, -1)[::-1].T
    places: np.ndarray = (blocks[:, None] + inside[None]).reshape(-1, dims)
    return places


def _known(link: Interconnect | None, target: Target) -> Interconnect:
    if link is None:
        raise ConfigError(
            f"{target.text}: the link speed between {target.chip.title}s is not known; "
            "measure with `replicax bench`, or plan for one device"
        )
    return link
