"""Training text: find it, split it, tokenize it and pack it into rows."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replicax.errors import ConfigError, DataError, require
from replicax.recipes.corpus import hold_out, read_corpus
from replicax.recipes.text_columns import Document
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
    targets represent. Of a mixture, `train` is a Grain MapDataset of such rows. `source` is a
    printable line on the text, the tokenizer and the number of tokens.
    """

    source: str
    tokenizer: Tokenizer
    train: Any
    train_rows: int
    heldout: dict[str, np.ndarray]


def text_dataset(
    paths: Sequence[Path],
    tokenizer_spec: str,
    vocab_size: int | None,
    context: int,
    column: str = "text",
    weights: Sequence[float] = (),
) -> TextDataset:
    """Load the text at `paths`, or of Python's standard library, in rows of `context` targets.

    `tokenizer_spec` and `vocab_size` are as in `replicax.recipes.tokenizer.open_tokenizer`; a BPE
    is trained only on the training documents. Without `weights`, the documents of all paths are
    read once; with one for each path, rows are mixed as in `mixed`.
    """
    if weights and (len(weights) != len(paths) or min(weights) <= 0):
        raise ConfigError(
            f"weights {', '.join(f'{each:g}' for each in weights)} for {len(paths)} paths of text; "
            "a mixture has a positive one for each: give as many --data-weights as --data"
        )
    corpora = [read_corpus(path, column) for path in paths] or [read_corpus()]
    parts = [hold_out(corpus) for corpus in corpora]
    train = [document for documents, _ in parts for document in documents]
    held_out = [document for _, documents in parts for document in documents]
    if tokenizer_spec == "bpe":
        _announce("training a BPE tokenizer on", train, BPE_TRAINING_BYTES_PER_SECOND)
    tokenizer = open_tokenizer(tokenizer_spec, train, vocab_size)
    is_bytes = tokenizer_spec == "bytes"
    rate = BYTES_ENCODING_BYTES_PER_SECOND if is_bytes else BPE_ENCODING_BYTES_PER_SECOND
    _announce("encoding", train + held_out, rate)

    groups = [documents for documents, _ in parts] if weights else [train]
    rows = [packed(tokenizer, documents, context) for documents in groups]
    heldout_rows = packed(tokenizer, held_out, context)
    for part_rows, corpus in zip(rows, corpora, strict=False):
        if part_rows["length"][0] < context:
            text = f"that of {corpus.name}" if weights else "the training text"
            raise DataError(
                f"context {context:,} needs {context + 1:,} tokens for one row, but {text} has "
                f"{_tokens(part_rows):,}; lower --context or provide more text"
            )
    source = "; ".join(corpus.source for corpus in corpora)
    source += f"; {tokenizer.name}; {sum(map(_tokens, rows)):,} training tokens, "
    source += f"{_tokens(heldout_rows):,} held out"
    if not weights:
        return TextDataset(source, tokenizer, rows[0], len(rows[0]["length"]), heldout_rows)
    mixture, times = mixed(rows, weights)
    source += f"; an epoch is {len(mixture):,} rows: " + ", ".join(
        f"{corpus.name} x {time:,.3g}" for corpus, time in zip(corpora, times, strict=True)
    )
    return TextDataset(source, tokenizer, mixture, len(mixture), heldout_rows)


def mixed(
    parts: Sequence[dict[str, np.ndarray]], weights: Sequence[float]
) -> tuple[Any, list[float]]:
    """Return a Grain MapDataset of the rows of all parts, and how often each part is in it.

    Any stretch of it has the rows of each part in proportion to its weight. The part that lasts
    longest is in it once; the others are repeated, shuffled anew.
    """
    grain = require("grain", "data")
    shares = [weight / sum(weights) for weight in weights]
    counts = [len(part["length"]) for part in parts]
    rows = math.ceil(max(count / share for count, share in zip(counts, shares, strict=True)))
    sources = [
        grain.MapDataset.source(_Rows(part)).shuffle(seed=number).repeat()
        for number, part in enumerate(parts)
    ]
    mixture = grain.MapDataset.mix(sources, weights)[:rows]
    return mixture, [rows * share / count for count, share in zip(counts, shares, strict=True)]


class _Rows:
    """The rows of arrays, one by one, as Grain reads them."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["length"])

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: array[row] for name, array in self._arrays.items()}


def _tokens(rows: dict[str, np.ndarray]) -> int:
    """Return the number of tokens: all targets, and the first, which is not a target."""
    return int(rows["length"].sum()) + 1


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
