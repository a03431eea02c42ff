"""The exchange of islands in a step: bytes, and time over a network that is given."""

import re
from dataclasses import dataclass

from replicax.errors import ConfigError
from replicax.islands.exchange_bytes import exchange_bytes
from replicax.islands.parts import dealt

LINK_EXAMPLE = "1 Gbit/s, 20 ms"
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BITS = {"bit": 8.0, "B": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_LINK = re.compile(rf"\s*{_NUMBER}\s*([kMGT]?)(bit|B)/s\s*,\s*{_NUMBER}\s*(s|ms|us|µs)\s*")
_ROUND_TRIPS = 2
"""One until all sums have arrived, and one until all islands know that."""


@dataclass(frozen=True)
class IslandLink:
    """The network of one island, to all others together."""

    text: str
    bytes_per_second: float
    """Rate at which it can send, while receiving at the same rate."""
    round_trip_seconds: float


@dataclass(frozen=True)
class IslandExchange:
    """The exchange of one step. It begins once all have computed their parts: nothing overlaps."""

    islands: int
    parts: int
    """Parts of a batch, dealt to the islands in consecutive spans."""
    most_parts: int
    """Parts that one island computes, at most."""
    sums_bytes: int
    """Bytes of the sums of one part."""
    sent_bytes: tuple[int, ...]
    """Bytes that each island sends, by index."""
    received_bytes: tuple[int, ...]
    link: IslandLink | None
    seconds: float | None
    """Time of the exchange; None if no network is given."""
    share: float | None
    """Share of a step of the island with the most parts; None if a time is unknown."""


def parse_link(text: str) -> IslandLink:
    """Parse a rate and a round trip such as `1 Gbit/s, 20 ms`; `ConfigError` if it is neither."""
    match = _LINK.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"between={text!r}; it must be a rate and a round-trip time, with units: write "
            f"{LINK_EXAMPLE!r}"
        )
    rate, scale, unit, time, of = match.groups()
    link = IslandLink(text.strip(), float(rate) * _SCALES[scale] / _BITS[unit], 0.0)
    if not link.bytes_per_second:
        raise ConfigError(f"between={text!r}; the rate must be above 0: write {LINK_EXAMPLE!r}")
    return IslandLink(link.text, link.bytes_per_second, float(time) * _SECONDS[of])


def island_exchange(
    islands: int,
    parts: int,
    sums_bytes: int,
    link: IslandLink | None = None,
    batch_seconds: float | None = None,
) -> IslandExchange:
    """Return the exchange of a step; one island computes the whole batch in `batch_seconds`.

    Raises:
        ConfigError: `parts` is no power of two.
    """
    if parts < 1 or parts & (parts - 1):
        raise ConfigError(
            f"micro_shards={parts} with islands; a binary tree needs a power of two: use "
            f"{1 << max(parts, 1).bit_length()}"
        )
    of_each = exchange_bytes(parts, islands, sums_bytes)
    sent, received = (tuple(column) for column in zip(*of_each, strict=True))
    most, seconds, share = max(map(len, dealt(range(parts), islands))), None, None
    if link is not None:
        most_bytes = max(*sent, *received)
        trips = _ROUND_TRIPS if islands > 1 else 0
        seconds = most_bytes / link.bytes_per_second + trips * link.round_trip_seconds
    if seconds is not None and batch_seconds:
        share = seconds / (seconds + batch_seconds * most / parts)
    return IslandExchange(islands, parts, most, sums_bytes, sent, received, link, seconds, share)
