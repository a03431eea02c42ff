"""Documents of any length, as rows of one length."""

from collections.abc import Iterable

import numpy as np

from replicax.errors import ConfigError, DataError


def pack(
    documents_ids: Iterable[np.ndarray], end_of_text: int, context: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """The documents, each followed by `end_of_text`, one after the other and cut into rows.

    Row r holds the tokens `r * context` up to and with `(r + 1) * context`: a row's inputs are
    `row[:-1]` and its targets `row[1:]`, and the last target of a row is the first input of the
    next. So every token but the very first is a target, and a target once.

    Args:
        documents_ids: Integers `[tokens]` in 0..vocab_size - 1, of each document.
        end_of_text: The id that follows each document, and that fills the last row.
        context: Targets of a row.
        vocab_size: The tokens are uint16 where that is enough for so many, and int32 otherwise.

    Returns:
        `tokens`, uint16 or int32 [rows, context + 1], and `length`, int32 [rows]: the first
        `length` targets of a row are text, and any after them padding. Both are read-only.

    Raises:
        ConfigError: `context` is below 1.
        DataError: there are fewer than two tokens, and thus no target.
    """
    if context < 1:
        raise ConfigError(f"context {context} leaves nothing to predict; it must be at least 1")
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    assert 0 <= end_of_text < vocab_size
    pieces = [np.empty(0, dtype)]
    for ids in documents_ids:
        # A narrower integer would wrap around without a word.
        assert not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size), "ids beyond vocab_size"
        pieces += [ids.astype(dtype), np.array([end_of_text], dtype)]
    stream = np.concatenate(pieces)

    targets = len(stream) - 1
    if targets < 1:
        raise DataError(
            f"a text of {len(stream)} tokens, with the ends of its documents, leaves nothing to "
            "predict; it takes at least 2; give more text"
        )
    rows = -(-targets // context)
    stream = np.pad(stream, (0, rows * context - targets), constant_values=end_of_text)
    tokens = np.lib.stride_tricks.sliding_window_view(stream, context + 1)[::context].copy()
    length = np.full(rows, context, np.int32)
    length[-1] = targets - (rows - 1) * context
    tokens.flags.writeable = length.flags.writeable = False
    return {"tokens": tokens, "length": length}
