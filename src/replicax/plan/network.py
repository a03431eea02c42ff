"""Hardware planned for -> the network that joins its devices, or some of them."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from replicax.analysis.hardware import Link
from replicax.core.mesh import AnyMesh, in_order
from replicax.errors import ConfigError
from replicax.plan.collective import Network
from replicax.plan.host_network import RING, TREE, HostNetwork
from replicax.plan.target import Target, host_bounds
from replicax.plan.torus import SliceNetwork, TorusNetwork

Networks = Callable[[tuple[str, ...] | None], Network]
"""From the mesh axes that a collective runs over, None for all of them, to what joins a group."""


def networks(target: Target, mesh: AnyMesh) -> Networks:
    """Return the networks of a target by mesh axes; see `network`.

    Args:
        target: the hardware.
        mesh: of its devices.
    """
    devices = in_order(range(target.devices), mesh.shape)

    @cache
    def over(axes: tuple[str, ...] | None) -> Network:
        if axes is None:
            return network(target)
        members = devices[tuple(slice(None) if axis in axes else 0 for axis in mesh.shape)]
        return network(target, members=sorted(members.reshape(-1).tolist()))

    return over


def network(
    target: Target,
    algorithms: tuple[str, ...] = (RING, TREE),
    members: Sequence[int] | None = None,
) -> Network:
    """Return what joins all devices of a target, or a group of them while all others do the same.

    GPUs are joined inside a host and by the hosts' network cards (`HostNetwork`), TPUs by the torus
    of their slice (`TorusNetwork`) and, between slices, the network of the data centre
    (`SliceNetwork`).

    Args:
        target: the hardware.
        algorithms: that may be chosen for an all-reduce between GPUs.
        members: numbers of the group's devices, in the order of the hosts; all by default.

    Raises:
        ConfigError: the links of this hardware are not known.
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
            algorithms,
        )
    slices = len({device * target.slices // target.devices for device in group})
    torus = _torus(target, group[: len(group) // slices])
    if slices == 1:
        return torus
    return SliceNetwork(torus, HostNetwork(None, _known(between, target), 1, slices))


def _torus(target: Target, group: Sequence[int]) -> TorusNetwork:
    """The part of a slice's torus that a group has.

    A group whose devices are not neighbours shares the links between them with others, and one that
    is no box goes as along a line.
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
    """Return `[devices, dims]`: where each device of a slice is, in the order of its processes.

    Processes, and the devices of each, are numbered along the first dimension first.
    """
    dims = len(topology)
    host = tuple(min(pair) for pair in zip(host_bounds(topology), topology, strict=False))
    hosts = tuple(size // own for size, own in zip(topology, host, strict=True))
    blocks = np.indices(hosts[::-1]).reshape(dims, -1)[::-1].T * np.asarray(host)
    inside = np.indices(host[::-1]).reshape(dims, -1)[::-1].T
    places: np.ndarray = (blocks[:, None] + inside[None]).reshape(-1, dims)
    return places


def _known(link: Link | None, target: Target) -> Link:
    if link is None:
        raise ConfigError(
            f"{target.text}: how fast {target.chip.title}s are joined is not known; "
            "measure with `replicax bench`, or plan for one device"
        )
    return link
