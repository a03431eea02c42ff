"""Hosts of several devices: a fast link inside each, network cards between them."""

import math
from dataclasses import dataclass

from replicax.analysis.hardware import Link
from replicax.plan.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    NOTHING_SENT,
    REDUCE_SCATTER,
    CollectiveTime,
    check,
)

RING, TREE = "ring", "tree"
LINE_RATE_SHARE = 0.96
"""Of a network card's line rate, what a collective gets: NCCL plans with 12.0 GB/s for 100 Gbit/s
(`NET_BW` in NVIDIA/nccl src/graph/topo.h). The rest is headers."""


@dataclass(frozen=True)
class HostNetwork:
    """`hosts` hosts with `devices_per_host` devices each that take part, as NCCL joins them.

    One ring goes through all devices and leaves each host once, on as many channels as it takes to
    use every card of the host, so a collective is as fast as the slower of the link inside and the
    cards of one host together. The tree of an all-reduce is a chain inside a host and a double
    binary tree between hosts, of which each device sends and receives every byte twice (once up and
    once down). The faster of the two is taken.

    Times are those of the α-β model (Hockney 1994): ring and pairwise exchange by Thakur,
    Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005);
    double binary trees by Sanders, Speck and Träff (2009); latency by steps inside and between
    hosts as in NVIDIA/nccl src/graph/tuning.cc.

    Args:
        inside: of one device in its host; None where a host has only one that takes part.
        between: one device's share of its host's network cards; None where there is one host.
        devices_per_host: that take part.
        hosts: that take part.
        algorithms: that may be chosen for an all-reduce: `ring`, `tree`.
    """

    inside: Link | None
    between: Link | None
    devices_per_host: int
    hosts: int = 1
    algorithms: tuple[str, ...] = (RING, TREE)

    def __post_init__(self) -> None:
        if self.devices_per_host < 1 or self.hosts < 1:
            raise ValueError(f"{self.hosts} hosts of {self.devices_per_host} devices")
        if (self.devices_per_host > 1 and not self.inside) or (self.hosts > 1 and not self.between):
            raise ValueError("no link joins the devices")

    @property
    def devices(self) -> int:
        """How many take part."""
        return self.hosts * self.devices_per_host

    @property
    def bytes_per_second(self) -> float:
        """At which every device of a ring can send and receive at once."""
        rates = []
        if self.inside and self.devices_per_host > 1:
            rates.append(self.inside.bytes_per_second)
        if self.hosts > 1:
            rates.append(self._card_rate * self.devices_per_host)
        return min(rates, default=math.inf)

    def time(self, kind: str, size: float) -> CollectiveTime:
        """One collective; see `Network`."""
        check(kind, size)
        n = self.devices
        if n == 1 or size == 0:
            return NOTHING_SENT
        once = (n - 1) / n * size / self.bytes_per_second + self._ring_latency
        if kind == ALL_REDUCE:
            times = {RING: 2 * once, TREE: 2 * size / self.bytes_per_second + self._tree_latency}
            algorithm = min(self.algorithms, key=times.__getitem__)
            return CollectiveTime(times[algorithm], algorithm)
        if kind == ALL_GATHER:
            return CollectiveTime(once, RING)
        if kind == REDUCE_SCATTER:
            sent = (n - 1) * size
            return CollectiveTime(sent / self.bytes_per_second + self._ring_latency, RING)
        if kind == BROADCAST:
            return CollectiveTime(size / self.bytes_per_second + self._ring_latency, RING)
        if kind == ALL_TO_ALL:
            return CollectiveTime(self._pairwise(size), "pairwise")
        return CollectiveTime(self._direct(size), "direct")

    @property
    def _card_rate(self) -> float:
        """Bytes a second of one device's share of the network cards."""
        return LINE_RATE_SHARE * self.between.bytes_per_second if self.between else math.inf

    @property
    def _latencies(self) -> tuple[float, float]:
        """Seconds of a step inside and between hosts."""
        inside, between = self.inside, self.between
        return (
            inside.latency_seconds if inside else 0.0,
            between.latency_seconds if between else 0.0,
        )

    @property
    def _ring_latency(self) -> float:
        """Of the n - 1 steps of a ring: a chunk crosses to another host in hosts - 1 of them."""
        inside, between = self._latencies
        return (self.devices - self.hosts) * inside + (self.hosts - 1) * between

    @property
    def _tree_latency(self) -> float:
        """Up and down: along the chain of a host, and the tree of hosts."""
        inside, between = self._latencies
        depth = math.ceil(math.log2(self.hosts))
        return 2 * ((self.devices_per_host - 1) * inside + depth * between)

    def _pairwise(self, size: float) -> float:
        """Each device sends an n-th to every other one; both kinds of link work at once."""
        inside, between = self._latencies
        part = size / self.devices
        near, far = self.devices_per_host - 1, self.devices - self.devices_per_host
        times = [near * inside, far * between]
        if self.inside and near:
            times[0] += near * part / self.inside.bytes_per_second
        if far:
            times[1] += far * part / self._card_rate
        return max(times)

    def _direct(self, size: float) -> float:
        """One message from each device; between hosts each has its own share of the cards."""
        inside, between = self._latencies
        if self.hosts > 1:
            return size / self._card_rate + between
        assert self.inside is not None
        return size / self.inside.bytes_per_second + inside
