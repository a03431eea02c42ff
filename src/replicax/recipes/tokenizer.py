"""Tokenizers: raw bytes, or byte-level BPE that is trained here or loaded from a file.

Every token represents a known number of bytes of text, which encoding verifies. A loss per token
can therefore be converted to a loss per byte, which is comparable across tokenizers.
"""

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.errors import ConfigError, DataError, did_you_mean, require
from replicax.recipes.text_columns import Document

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
"""Names of the token between documents; the first that a tokenizer has is used."""
TRAINED_VOCAB_SIZE = 4096
"""Default vocabulary size of a trained BPE."""
# During encoding, a token takes a hundred times the memory of its id. A long document is therefore
# split into pieces, and only a few pieces of a few documents are encoded at a time.
PIECE_CHARACTERS = 1 << 17
PIECES_AT_ONCE = 4
_THREADS = 16
# GPT-2's rules and later ones never form a token across the boundary of two non-blank lines.
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


def open_tokenizer(
    spec: str, documents: Iterable[Document], vocab_size: int | None = None
) -> "Tokenizer":
    """Return the tokenizer "bytes"; "bpe", trained on `documents`; or the tokenizer.json `spec`.

    `vocab_size` applies only to "bpe", with a default of 4,096.
    """
    if spec == "bpe":
        return train_bpe(documents, TRAINED_VOCAB_SIZE if vocab_size is None else vocab_size)
    tokenizer: Tokenizer
    if spec == "bytes":
        tokenizer = ByteTokenizer()
    elif Path(spec).exists():
        tokenizer = load_tokenizer(Path(spec))
    else:
        raise ConfigError(
            f'tokenizer {spec!r} is neither "bytes" nor "bpe" nor a tokenizer.json that exists'
            f"{did_you_mean(spec, ('bytes', 'bpe'))}"
        )
    if vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"a vocabulary of {vocab_size:,} does not match tokenizer {tokenizer.name}; only the "
            'size of "bpe" can be chosen; drop the size, or use "bpe"'
        )
    return tokenizer


class ByteTokenizer:
    """A tokenizer whose ids 0..255 are the bytes, UTF-8 or not, and 256 is the end of text."""

    name = "bytes (vocabulary 257)"
    """Printable name with the vocabulary size."""
    vocab_size = 257
    """One more than the largest id."""
    end_of_text = 256
    """The id between documents; no text encodes to it."""
    token_bytes = np.array([1] * 256 + [0], np.int32)
    """Bytes of text per id, int32 [vocab_size]; 0 for special tokens."""
    token_bytes.flags.writeable = False

    def encode(self, document: Document) -> np.ndarray:
        """Return ids, int32 [tokens], whose `token_bytes` sum to the document's bytes."""
        return np.frombuffer(document.content, np.uint8).astype(np.int32)

    def encode_all(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """Encode one document after the other."""
        return map(self.encode, documents)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in ids if token != 256).decode(errors="replace")


class BPETokenizer:
    """A byte-level tokenizer of the tokenizers library, with a `name`.

    Special tokens are not recognized in text: their spelling is encoded like any other text.
    `encode` and `encode_all` raise DataError for a document that is not UTF-8, or that the
    tokenizer does not reproduce byte for byte.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer", name: str) -> None:
        _refuse_what_is_not_byte_level(tokenizer, name)
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.end_of_text = _find_end_of_text(tokenizer, name)
        self.token_bytes = _token_bytes(tokenizer)
        self.token_bytes[self.end_of_text] = 0
        self.token_bytes.flags.writeable = False
        self.vocab_size = len(self.token_bytes)
        self.name = f"{name} (vocabulary {self.vocab_size:,})"

    def encode(self, document: Document) -> np.ndarray:
        pieces, ids = list(_pieces(_text(document))), array("i")
        for start in range(0, len(pieces), PIECES_AT_ONCE):
            batch = pieces[start : start + PIECES_AT_ONCE]
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids.extend(encoding.ids)
        self._check(document, ids)
        return np.array(ids, np.int32)

    def encode_all(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """Encode one document after the other, using all cores."""
        with ThreadPoolExecutor(_THREADS) as threads:  # the library encodes without the GIL
            yield from threads.map(self.encode, documents)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        text: str = self._tokenizer.decode([token for token in ids if token != self.end_of_text])
        return text

    def _check(self, document: Document, ids: Sequence[int]) -> None:
        content, back = document.content, self.decode(ids).encode()
        if back == content:
            return
        at = next(i for i in range(len(content) + 1) if content[i : i + 1] != back[i : i + 1])
        raise DataError(
            f"{document.name} is not reproduced by {self.name}: from byte "
            f"{document.offset + at:,} on, {content[at : at + 8]!r} became {back[at : at + 8]!r}; "
            "a tokenizer must preserve the text (no normalizer, no prefix space, a token for each "
            'byte); use another, or "bytes" or "bpe"'
        )


Tokenizer = ByteTokenizer | BPETokenizer


def train_bpe(documents: Iterable[Document], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE like GPT-2's, deterministically from the documents.

    The vocabulary is smaller than `vocab_size` if the documents have no more pairs to merge; `name`
    then says so.
    """
    library = require("tokenizers", "text")
    if vocab_size < 257:
        raise ConfigError(
            f"a BPE vocabulary of {vocab_size:,} is too small: 256 bytes and the end of text are "
            "257 tokens, and each further one is a merge; use at least 257"
        )
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_text, documents), trainer)
    name = "BPE trained on this text"
    if (size := tokenizer.get_vocab_size()) < vocab_size:
        name += f", with only {size - 257:,} of the {vocab_size - 257:,} requested merges"
    return BPETokenizer(tokenizer, name)


def load_tokenizer(path: Path) -> BPETokenizer:
    """Load the byte-level tokenizer in a tokenizer.json.

    The end of text is the first of `<|endoftext|>`, `</s>`, `<|end_of_text|>` and `<eos>` that it
    has. Truncation and padding settings in the file are ignored.
    """
    library = require("tokenizers", "text")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f'{path} cannot be read: {error.strerror}; use a tokenizer.json, "bytes" or "bpe"'
        ) from error
    try:
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library has no narrower exception
        raise DataError(
            f"{path} is not a tokenizer.json: {' '.join(str(error).split())[:160]}; use a file "
            'saved by the tokenizers library, or "bytes" or "bpe"'
        ) from error
    return BPETokenizer(tokenizer, str(path))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while end := LINE_END.search(text, start + PIECE_CHARACTERS):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def _text(document: Document) -> str:
    try:
        return document.content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.name} is not UTF-8: byte 0x{document.content[error.start]:02x} at offset "
            f'{document.offset + error.start:,}; use tokenizer "bytes", or convert the file'
        ) from error


def _refuse_what_is_not_byte_level(tokenizer: "tokenizers.Tokenizer", name: str) -> None:
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    decoder = parts["decoder"] or {"type": "none"}
    kinds = [part["type"] for part in decoder.get("decoders", [decoder])]
    if "ByteLevel" not in kinds:
        raise DataError(
            f"{name} is not byte-level (its decoder: {', '.join(kinds)}), so the number of bytes "
            "per token is unknown; use a byte-level one such as GPT-2's, Llama 3's or Qwen's, or "
            '"bytes" or "bpe"'
        )
    if dropout := parts["model"].get("dropout"):
        raise DataError(
            f"{name} drops {dropout:.0%} of its merges at random, so processes would see different "
            'tokens; set "dropout" to null in it'
        )


def _find_end_of_text(tokenizer: "tokenizers.Tokenizer", name: str) -> int:
    for token in ENDS_OF_TEXT:
        if (token_id := tokenizer.token_to_id(token)) is not None:
            return token_id
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    raise DataError(
        f"{name} has no end-of-text token: none of {' '.join(ENDS_OF_TEXT)} is among "
        f"its {len(special)} special tokens{': ' if special else ''}{' '.join(special[:16])}"
        f"{' ...' if special[16:] else ''}; add one of these to it"
    )


def _token_bytes(tokenizer: "tokenizers.Tokenizer") -> np.ndarray:
    """Return the bytes per id; 0 for special tokens and unused ids."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    sizes = np.zeros(max(vocab.values()) + 1, np.int32)
    for token, token_id in vocab.items():
        if token_id not in added:
            sizes[token_id] = len(token)  # one character per byte
        elif not added[token_id].special:
            sizes[token_id] = len(token.encode())
    return sizes
