"""Training methods over slow links: bytes, waiting time and utilization of each, and which to use.

Utilization is the share of the time in which an island computes. An exchange begins after a step
and what it takes beyond the steps that may hide it is waited for; the links carry one exchange
after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicax.core.between.rounds import Rounds
from replicax.core.ground.codecs import CodecName
from replicax.plan.island_exchange import ROUND_TRIPS
from replicax.plan.site_network import SiteNetwork
from replicax.text.wording import UNKNOWN

ENOUGH = 0.9
"""Utilization above which less risk for the loss counts more than more speed."""
DELAY_STEPS = 5
"""Steps for which an overlapped exchange may last: up to 5 cost less than 0.2% of the loss
(arXiv 2501.18512, section 3.3.2)."""
FRAGMENTS = 5
"""Parts that a streaming method sends one by one."""


@dataclass(frozen=True)
class SlowLinkForecast:
    """A method over a network."""

    method: Rounds
    sync_bytes: int
    """Bytes that one island sends to each other one in an exchange of all fragments."""
    transfer_seconds: float
    """Time of that on the links."""
    exposed_seconds: float | None
    """Waiting time per exchange of all fragments; None if the time of a step is unknown."""
    utilization: float | None
    loss_cost: str
    """Published difference of the evaluation loss from that of data parallelism."""


@dataclass(frozen=True)
class SlowLinks:
    """All methods over a network, and the one to use."""

    network: SiteNetwork
    islands: int
    step_seconds: float | None
    """Computation of one island in a step."""
    forecasts: tuple[SlowLinkForecast, ...]
    recommended: int | None
    """Index of the method to use; None if the time of a step is unknown."""
    why: str


_PLAIN: tuple[CodecName, ...] = ("float32", "bfloat16", "int8", "int4")


def _streamed(every: int, send: CodecName) -> Rounds:
    return Rounds(every=every, send=send, fragments=FRAGMENTS, delay=DELAY_STEPS)


METHODS: tuple[Rounds, ...] = (
    *(Rounds(every=1, send=send) for send in _PLAIN),
    *(Rounds(every=30, send=send) for send in _PLAIN),
    *(_streamed(30, send) for send in _PLAIN),
    Rounds(every=30, send="sparse"),
    *(Rounds(every=100, send=send) for send in _PLAIN),
    *(_streamed(100, send) for send in _PLAIN),
)
"""In order of their risk for the loss: sums of every step, then differences every 30 steps, then
with a delay, then sparse, then every 100 steps."""


def method_title(method: Rounds) -> str:
    """Return the name of a method in tables."""
    kind = "data parallel"
    if method.every > 1:
        kind = "streaming DiLoCo" if method.fragments > 1 else "DiLoCo"
    if method.codec.error >= 1:
        kind = "SparseLoCo"
    return f"{kind} {method.codec.name}"


def utilization(
    compute_seconds: float, transfer_seconds: float, hidden_seconds: float, tail_seconds: float = 0
) -> float:
    """Return the share of the time spent computing, if transfers follow one another.

    Args:
        compute_seconds: computation between the starts of two transfers.
        transfer_seconds: one transfer.
        hidden_seconds: computation that a transfer may take from its start. Beyond the start of the
            next transfer it hides nothing more: links that are always busy set the pace.
        tail_seconds: part of a transfer that is never hidden.
    """
    hidden = min(hidden_seconds, compute_seconds)
    return compute_seconds / (compute_seconds + max(tail_seconds, transfer_seconds - hidden))


def forecast(
    arrays: Sequence[Any],
    step_seconds: float | None,
    islands: int,
    network: SiteNetwork,
    method: Rounds,
) -> SlowLinkForecast:
    """Return the waiting time and the utilization of a method.

    Args:
        arrays: the parameters that are exchanged, or their shapes.
        step_seconds: the computation of one island in a step.
        islands: number of islands; each sends its payload to all others (one rounding).
        network: see `parse_network`.
        method: one of `METHODS`, or another.
    """
    fragments = method.payload_bytes(arrays)
    seconds = [network.seconds(payload, islands, ROUND_TRIPS) for payload in fragments]
    exposed = share = None
    if step_seconds is not None:
        compute, hidden = step_seconds * method.interval, step_seconds * method.delay
        taken = sum(compute / utilization(compute, each, hidden) for each in seconds)
        exposed = taken - method.fragments * compute
        share = method.fragments * compute / taken
    sizes = sum(array.size for array in arrays)
    cost = published_cost(sizes, islands, method.every, method.codec.name, method.delay > 0)
    return SlowLinkForecast(method, sum(fragments), sum(seconds), exposed, share, cost)


def slow_links(
    arrays: Sequence[Any],
    step_seconds: float | None,
    network: SiteNetwork,
    islands: int | None = None,
    methods: Sequence[Rounds] = METHODS,
) -> SlowLinks:
    """Return the forecast of every method, and the one to use: the first that computes enough."""
    count = network.islands if islands is None else islands
    found = tuple(forecast(arrays, step_seconds, count, network, each) for each in methods)
    best, why = _recommended(found)
    return SlowLinks(network, count, step_seconds, found, best, why)


def _recommended(found: Sequence[SlowLinkForecast]) -> tuple[int | None, str]:
    shares = [each.utilization for each in found if each.utilization is not None]
    if len(shares) < len(found):
        return None, "the time of a step is unknown, so which method waits how long is unknown too"
    enough = [index for index, share in enumerate(shares) if share >= ENOUGH]
    if enough:
        return enough[0], (
            f"the least risk for the loss of those that compute at least {ENOUGH:.0%} of the time"
        )
    fastest = max(range(len(found)), key=shares.__getitem__)
    return fastest, f"none computes {ENOUGH:.0%} of the time; this one computes most"


_Costs = Mapping[int, Mapping[int, float]]
"""Percent by parameters, then by islands."""

EVERY_30: _Costs = {
    35_000_000: {1: -0.1, 2: 0.7, 4: 2.0, 8: 3.9},
    180_000_000: {1: -0.2, 2: 0.3, 4: 1.1, 8: 2.3},
    550_000_000: {1: -0.3, 2: 0.2, 4: 0.7, 8: 1.7},
    2_400_000_000: {1: -0.4, 2: -0.1, 4: 0.3, 8: 1.1},
}
"""DiLoCo every 30 steps: arXiv 2503.09799, table 4."""
OVERLAPPED_30: _Costs = {
    35_000_000: {2: 0.6, 4: 2.6},
    1_000_000_000: {2: -0.4, 4: 0.4},
}
"""Streaming DiLoCo with 4-bit floats every 30 steps: arXiv 2501.18512, tables 5 and 6."""
OVERLAPPED_100: _Costs = {
    35_000_000: {2: 1.4, 4: 3.7},
    1_000_000_000: {2: 0.4, 4: 1.6},
}
"""Streaming DiLoCo every 100 steps, same tables: the nearest that is published to DiLoCo then."""
_SEVERAL_STEPS = 65
"""Steps above which a cost is that of 100 steps."""


def published_cost(
    parameters: int, islands: int, every: int, send: str, overlapped: bool = False
) -> str:
    """Return the published cost nearest to these sizes, or what is known in words."""
    if every == 1:
        return "none" if send == "float32" else UNKNOWN
    if send == "sparse":
        return "as DiLoCo"
    costs = EVERY_30
    if every > _SEVERAL_STEPS:
        costs = OVERLAPPED_100
    elif overlapped:
        costs = OVERLAPPED_30
    size = max((size for size in costs if size <= parameters), default=min(costs))
    counts = costs[size]
    count = min((each for each in counts if each >= islands), default=max(counts))
    beyond = ">" if count < islands or size > parameters else ""
    return f"{beyond}{counts[count]:+.1f}% {_size_text(size)}"


def _size_text(parameters: int) -> str:
    if parameters >= 1_000_000_000:
        return f"{parameters / 1e9:g}B"
    return f"{parameters / 1e6:g}M"
