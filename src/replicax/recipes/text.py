"""Training text: find it, split it, tokenize it and pack it into rows."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replicax.errors import ConfigError, DataError
from replicax.recipes.corpus import Document, read_corpus, split
from replicax.recipes.tokenizer import Tokenizer, open_tokenizer

# Rates on two cores; work of less than a second is not announced.
BPE_TRAINING_BYTES_PER_SECOND = 6e6
BPE_ENCODING_BYTES_PER_SECOND = 2.5e6
BYTES_ENCODING_BYTES_PER_SECOND = 100e6


@dataclass(frozen=True, eq=False)
class TextDataset:
    """Rows of tokens, in host memory and read-only.

    `train` and `heldout` each hold `tokens`, uint16 or int32 [rows, context + 1], and `length`,
    int32 [rows], as described in `pack`, and `bytes`, int32 [rows]: the bytes of text that a row's
    targets represent. `source` is a printable line on the text, the tokenizer and the number of
    tokens.
    """

    source: str
    tokenizer: Tokenizer
    train: dict[str, np.ndarray]
    heldout: dict[str, np.ndarray]


def text_dataset(
    path: Path | None, tokenizer_spec: str, vocab_size: int | None, context: int
) -> TextDataset:
    """Load the text at `path`, or of Python's standard library, in rows of `context` targets.

    `tokenizer_spec` and `vocab_size` are as in `replicax.recipes.tokenizer.open_tokenizer`; a BPE
    is trained only on the training documents.
    """
    corpus = read_corpus(path)
    train, held_out = split(corpus)
    if tokenizer_spec == "bpe":
        _announce("training a BPE tokenizer on", train, BPE_TRAINING_BYTES_PER_SECOND)
    tokenizer = open_tokenizer(tokenizer_spec, train, vocab_size)
    is_bytes = tokenizer_spec == "bytes"
    rate = BYTES_ENCODING_BYTES_PER_SECOND if is_bytes else BPE_ENCODING_BYTES_PER_SECOND
    _announce("encoding", train + held_out, rate)

    rows, heldout_rows = (packed(tokenizer, each, context) for each in (train, held_out))
    # All targets, and the first token, which is not a target.
    tokens, heldout_tokens = (int(each["length"].sum()) + 1 for each in (rows, heldout_rows))
    if rows["length"][0] < context:
        raise DataError(
            f"context {context:,} needs {context + 1:,} tokens for one row, but the training text "
            f"has {tokens:,}; lower --context or provide more text"
        )
    source = (
        f"{corpus.source}; {tokenizer.name}; {tokens:,} training tokens, "
        f"{heldout_tokens:,} held out"
    )
    return TextDataset(source, tokenizer, rows, heldout_rows)


def packed(
    tokenizer: Tokenizer, documents: Iterable[Document], context: int
) -> dict[str, np.ndarray]:
    """Return rows of `context` targets; see `TextDataset`."""
    ids = tokenizer.encode_all(documents)
    rows = pack(ids, tokenizer.end_of_text, context, tokenizer.vocab_size)
    # The end-of-text token, which pads the last row, has no bytes.
    size = tokenizer.token_bytes[rows["tokens"][:, 1:]].sum(axis=1, dtype=np.int32)
    size.flags.writeable = False
    return {**rows, "bytes": size}


def pack(
    documents_ids: Iterable[np.ndarray], end_of_text: int, context: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """Concatenate the documents, each followed by `end_of_text`, and split them into rows.

    Row r holds the tokens `r * context` to `(r + 1) * context`, inclusive: a row's inputs are
    `row[:-1]` and its targets `row[1:]`, and the last target of a row is the first input of the
    next. Every token except the first is thus a target exactly once.

    The last row is padded with `end_of_text`.

    Returns:
        `tokens`, uint16 if the vocabulary fits, else int32 [rows, context + 1], and `length`,
        int32 [rows]: the first `length` targets of a row are text, and the rest is padding.
    """
    if context < 1:
        raise ConfigError(f"context {context} leaves nothing to predict; it must be at least 1")
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    assert 0 <= end_of_text < vocab_size
    pieces = [np.empty(0, dtype)]
    for ids in documents_ids:
        # A narrower integer would wrap around silently.
        assert not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size), "ids beyond vocab_size"
        pieces += [ids.astype(dtype), np.array([end_of_text], dtype)]
    stream = np.concatenate(pieces)

    targets = len(stream) - 1
    if targets < 1:
        raise DataError(
            f"a text of {len(stream)} tokens, including the ends of its documents, leaves nothing "
            "to predict; at least 2 are needed; provide more text"
        )
    rows = -(-targets // context)
    stream = np.pad(stream, (0, rows * context - targets), constant_values=end_of_text)
    tokens = np.lib.stride_tricks.sliding_window_view(stream, context + 1)[::context].copy()
    length = np.full(rows, context, np.int32)
    length[-1] = targets - (rows - 1) * context
    tokens.flags.writeable = length.flags.writeable = False
    return {"tokens": tokens, "length": length}


def _announce(doing: str, documents: Iterable[Document], bytes_per_second: float) -> None:
    size = sum(len(document.content) for document in documents)
    if size > bytes_per_second:
        print(f"{doing} {size / 1e6:,.1f} MB", file=sys.stderr)
