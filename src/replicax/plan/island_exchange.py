"""The exchange of islands in a step: bytes, and time over a network that is given."""

from dataclasses import dataclass

from replicax.errors import ConfigError
from replicax.islands.parts import blocks_of, dealt
from replicax.plan.site_network import SiteNetwork

ROUND_TRIPS = 2
"""One until all sums have arrived, and one until all islands know that."""


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
    network: SiteNetwork | None
    seconds: float | None
    """Time of the exchange; None if no network is given."""
    share: float | None
    """Share of a step of the island with the most parts; None if a time is unknown."""


def island_exchange(
    islands: int,
    parts: int,
    sums_bytes: int,
    network: SiteNetwork | None = None,
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
    if network is not None:
        to_each = max(*sent, *received) / max(1, islands - 1)
        seconds = network.seconds(to_each, islands, ROUND_TRIPS)
    if seconds is not None and batch_seconds:
        share = seconds / (seconds + batch_seconds * most / parts)
    return IslandExchange(islands, parts, most, sums_bytes, sent, received, network, seconds, share)


def blocks_sent(parts: int, islands: int) -> list[int]:
    """Return the number of sums that each island sends to each other one.

    Examples:
        >>> blocks_sent(8, 3)
        [1, 2, 2]
    """
    return [len(blocks_of(span, parts)) for span in dealt(range(parts), islands)]


def exchange_bytes(parts: int, islands: int, sums_bytes: int) -> list[tuple[int, int]]:
    """Return the bytes that each island sends and receives, without the headers of its frames.

    `sums_bytes` are those of the sums of one part, or of any number of parts together.
    """
    blocks = blocks_sent(parts, islands)
    return [(own * (islands - 1) * sums_bytes, (sum(blocks) - own) * sums_bytes) for own in blocks]
