"""The bytes of a usual exchange, in which all islands live and compute their own spans of parts."""

from replicax.islands.parts import blocks_of, dealt


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
