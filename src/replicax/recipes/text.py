"""Text to train on: found, split, turned into tokens and packed into rows."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replicax.errors import DataError
from replicax.recipes.corpus import Document, read_corpus, split
from replicax.recipes.packing import pack
from replicax.recipes.tokenizer import Tokenizer, open_tokenizer

# On two cores; what is below a second by these is not worth announcing.
BPE_TRAINING_BYTES_PER_SECOND = 6e6
BPE_ENCODING_BYTES_PER_SECOND = 2.5e6
BYTES_ENCODING_BYTES_PER_SECOND = 100e6


@dataclass(frozen=True, eq=False)
class TextDataset:
    """Rows of tokens, in host memory and read-only.

    `train` and `heldout` each hold `tokens`, uint16 or int32 [rows, context + 1], and `length`,
    int32 [rows], as `replicax.recipes.packing.pack` describes them, and `bytes`, int32 [rows]: the
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
