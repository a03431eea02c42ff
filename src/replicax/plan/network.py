"""Hardware planned for -> the network that joins its devices."""

from replicax.analysis.hardware import Link
from replicax.errors import ConfigError
from replicax.plan.collective import Network
from replicax.plan.host_network import RING, TREE, HostNetwork
from replicax.plan.target import Target
from replicax.plan.torus import SliceNetwork, TorusNetwork


def network(target: Target, algorithms: tuple[str, ...] = (RING, TREE)) -> Network:
    """What joins all devices of a target.

    GPUs are joined inside a host and by the hosts' network cards (`HostNetwork`), TPUs by the torus
    of their slice (`TorusNetwork`) and, between slices, the network of the data centre
    (`SliceNetwork`).

    Args:
        target: the hardware.
        algorithms: that may be chosen for an all-reduce between GPUs.

    Raises:
        ConfigError: the links of this hardware are not known.
    """
    if target.devices == 1:
        return HostNetwork(None, None, 1)
    inside, between = target.chip.inside, target.chip.between
    if target.topology is None:
        each = target.devices_per_host
        return HostNetwork(
            _known(inside, target) if each > 1 else None,
            _known(between, target) if target.hosts > 1 else None,
            each,
            target.hosts,
            algorithms,
        )
    link = _known(inside, target)
    torus = TorusNetwork(
        target.topology,
        target.rings,
        link.bytes_per_second / (2 * target.chip.torus_dims),
        link.latency_seconds,
    )
    if target.slices == 1:
        return torus
    return SliceNetwork(torus, HostNetwork(None, _known(between, target), 1, target.slices))


def _known(link: Link | None, target: Target) -> Link:
    if link is None:
        raise ConfigError(
            f"{target.text}: how fast {target.chip.title}s are joined is not known; "
            "measure with `replicax bench`, or plan for one device"
        )
    return link
