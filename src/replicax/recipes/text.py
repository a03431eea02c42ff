"""Text to train on: found, split, turned into tokens and packed into rows."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replicax.errors import ConfigError, DataError
from replicax.recipes.corpus import Document, read_corpus, split
from replicax.recipes.tokenizer import Tokenizer, open_tokenizer

# On two cores; what is below a second by these is not worth announcing.
BPE_TRAINING_BYTES_PER_SECOND = 6e6
BPE_ENCODING_BYTES_PER_SECOND = 2.5e6
BYTES_ENCODING_BYTES_PER_SECOND = 100e6


@dataclass(frozen=True, eq=False)
class TextDataset:
    """Rows of tokens, in host memory and read-only.

    `train` and `heldout` each hold `tokens`, uint16 or int32 [rows, context + 1], and `length`,
    int32 [rows], as `pack` describes them, and `bytes`, int32 [rows]: the
    bytes of text that a row's targets stand for. `source` says in one line which text and tokenizer
    these are and how many tokens, for printing.
    """

    source: str
    tokenizer: Tokenizer
    train: dict[str, np.ndarray]
    heldout: dict[str, np.ndarray]


def text_dataset(
    path: Path | None, tokenizer_spec: str, vocab_size: int | None, context: int
) -> TextDataset:
    """The text at `path`, or of Python's standard library, in rows of `context` targets.

    `tokenizer_spec` and `vocab_size` are those of `replicax.recipes.tokenizer.open_tokenizer`; a
    BPE is trained on the training documents alone.

    Raises:
        ConfigError: `tokenizer_spec`, `vocab_size` or `context` cannot work.
        DataError: the text or the tokenizer cannot be read or do not fit each other, or there is
            too little text to hold some out and fill a row with the rest.
        MissingDependencyError: tokenizers is not installed, and `tokenizer_spec` is not "bytes".
    """
    corpus = read_corpus(path)
    train, held_out = split(corpus)
    if tokenizer_spec == "bpe":
        _announce("training a BPE tokenizer on", train, BPE_TRAINING_BYTES_PER_SECOND)
    tokenizer = open_tokenizer(tokenizer_spec, train, vocab_size)
    rate = BPE_ENCODING_BYTES_PER_SECOND
    if tokenizer_spec == "bytes":
        rate = BYTES_ENCODING_BYTES_PER_SECOND
    _announce("encoding", train + held_out, rate)

    rows = packed(tokenizer, train, context)
    if rows["length"][0] < context:
        raise DataError(
            f"context {context:,} takes {context + 1:,} tokens for one row, and the training text "
            f"has {_tokens(rows):,}; lower --context or give more text"
        )
    heldout_rows = packed(tokenizer, held_out, context)
    source = (
        f"{corpus.source}; {tokenizer.name}; {_tokens(rows):,} tokens to train on, "
        f"{_tokens(heldout_rows):,} held out"
    )
    return TextDataset(source, tokenizer, rows, heldout_rows)


def packed(
    tokenizer: Tokenizer, documents: Iterable[Document], context: int
) -> dict[str, np.ndarray]:
    """Rows of `context` targets; see `TextDataset`."""
    ids = tokenizer.encode_all(documents)
    rows = pack(ids, tokenizer.end_of_text, context, tokenizer.vocab_size)
    return {**rows, "bytes": _target_bytes(rows, tokenizer.token_bytes)}


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


def _target_bytes(rows: dict[str, np.ndarray], token_bytes: np.ndarray) -> np.ndarray:
    # What fills the last row is the end of text, which has no bytes.
    counted: np.ndarray = token_bytes[rows["tokens"][:, 1:]].sum(axis=1, dtype=np.int32)
    counted.flags.writeable = False
    return counted


def _tokens(rows: dict[str, np.ndarray]) -> int:
    """Tokens before packing: every target, and the first, which is none."""
    return int(rows["length"].sum()) + 1


def _announce(doing: str, documents: Iterable[Document], bytes_per_second: float) -> None:
    size = sum(len(document.content) for document in documents)
    if size > bytes_per_second:
        print(f"{doing} {size / 1e6:,.1f} MB", file=sys.stderr)
