"""Text to tokens and back: bytes as they are, or byte-level BPE, trained here or brought along.

Of every token it is known how many bytes of text it stands for, and encoding proves it: so a loss
per token can be told per byte, which compares across tokenizers.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.errors import ConfigError, DataError, did_you_mean, require
from replicax.recipes.corpus import Document

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
"""Names of the token between documents; the first that a tokenizer has is taken."""
TRAINED_VOCAB_SIZE = 4096
"""Vocabulary of a BPE trained here, where no other is asked for."""
# What one token costs while it is being encoded is a hundred times what its id takes.
PIECE_CHARACTERS = 1 << 17
BATCH_CHARACTERS = 1 << 22


def open_tokenizer(
    spec: str, documents: Iterable[Document], vocab_size: int | None = None
) -> "Tokenizer":
    """The tokenizer "bytes"; or "bpe", trained on `documents`; or the tokenizer.json at `spec`.

    `vocab_size` is for "bpe" alone, whose default is 4,096.

    Raises:
        ConfigError: `spec` is none of these, or `vocab_size` contradicts it.
        DataError: what `train_bpe` and `load_tokenizer` raise.
        MissingDependencyError: tokenizers is not installed, and `spec` is not "bytes".
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
            f"a vocabulary of {vocab_size:,} is asked for, and tokenizer {tokenizer.name} given; "
            'only that of "bpe" can be chosen; drop the size, or use "bpe"'
        )
    return tokenizer


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves, UTF-8 or not, and 256 is the end of text."""

    name = "bytes (vocabulary 257)"
    """The tokenizer with its vocabulary's size, for printing."""
    vocab_size = 257
    """One more than the largest id."""
    end_of_text = 256
    """The id to put between documents; no text is encoded as it."""
    token_bytes = np.array([1] * 256 + [0], np.int32)
    """Bytes of text that each id stands for, int32 [vocab_size]; 0 for special tokens."""
    token_bytes.flags.writeable = False

    def encode(self, document: Document) -> np.ndarray:
        """Ids, int32 [tokens]; their `token_bytes` add up to the document's."""
        return np.frombuffer(document.content, np.uint8).astype(np.int32)

    def encode_all(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """Encode one document after the other."""
        return map(self.encode, documents)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; special tokens have none, and what is not UTF-8 becomes U+FFFD."""
        array = _checked(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes().decode(errors="replace")


class BPETokenizer:
    """A byte-level tokenizer of the tokenizers library, under the `name` given.

    Special tokens are never found in text: where it spells one out, it is text like any other.
    `encode` and `encode_all` raise DataError for a document that is not UTF-8, and for one that
    the tokenizer does not give back byte for byte.

    Raises:
        DataError: the tokenizer is not byte-level, is random, or has no token for an end of text.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer", name: str) -> None:
        _refuse_what_is_not_byte_level(tokenizer, name)
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.end_of_text = _find_end_of_text(tokenizer, name)
        self._text = _text_of_tokens(tokenizer)
        self._text[self.end_of_text] = b""
        self.vocab_size = len(self._text)
        self.name = f"{name} (vocabulary {self.vocab_size:,})"
        self.token_bytes = np.array([len(text) for text in self._text], np.int32)
        self.token_bytes.flags.writeable = False

    def encode(self, document: Document) -> np.ndarray:
        return next(self.encode_all([document]))

    def encode_all(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """Encode one document after the other, on all processor cores.

        A long document is encoded in pieces, cut at the start of a line; only one batch of pieces
        is in memory in the library's own, large, form.
        """
        ids: list[int] = []
        for batch in _batches(documents):
            texts = [piece.text for piece in batch]
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                ids += encoding.ids
                if piece.is_last:
                    self._check(piece.document, ids)
                    yield np.array(ids, np.int32)
                    ids = []

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._bytes(_checked(ids, self.vocab_size)).decode(errors="replace")

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._text.__getitem__, ids))

    def _check(self, document: Document, ids: list[int]) -> None:
        content, back = document.content, self._bytes(ids)
        if back == content:
            return
        pairs = enumerate(zip(content, back, strict=False))
        shorter = min(len(content), len(back))
        at = next((i for i, (one, other) in pairs if one != other), shorter)
        raise DataError(
            f"{document.name} is not given back by {self.name}: from byte "
            f"{document.offset + at:,} on, {content[at : at + 8]!r} became {back[at : at + 8]!r}; "
            "a tokenizer must keep the text (no normalizer, no prefix space, a token for each "
            'byte); use another, or "bytes" or "bpe"'
        )


Tokenizer = ByteTokenizer | BPETokenizer


def train_bpe(documents: Iterable[Document], vocab_size: int) -> BPETokenizer:
    """A byte-level BPE like GPT-2's, the same whenever the documents are the same.

    Its vocabulary is smaller than `vocab_size` where the documents have no more pairs to merge;
    `name` then says so.

    Raises:
        ConfigError: `vocab_size` is below 257, for the 256 bytes and the end of text.
        DataError: a document is not UTF-8.
        MissingDependencyError: tokenizers is not installed.
    """
    library = require("tokenizers", "text")
    if vocab_size < 257:
        raise ConfigError(
            f"a BPE vocabulary of {vocab_size:,} is too small: 256 bytes and the end of text are "
            "257 tokens, and each further one is a merge; ask for at least 257"
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
        name += f", which has only {size - 257:,} of the {vocab_size - 257:,} merges asked for"
    return BPETokenizer(tokenizer, name)


def load_tokenizer(path: Path) -> BPETokenizer:
    """The byte-level tokenizer in a tokenizer.json.

    The end of text is the first of `<|endoftext|>`, `</s>`, `<|end_of_text|>` and `<eos>` that it
    has. Truncation and padding that the file asks for are left off.

    Raises:
        DataError: the file cannot be read, or holds no tokenizer, or one that is not byte-level,
            that drops merges at random, or that has no token for the end of text.
        MissingDependencyError: tokenizers is not installed.
    """
    library = require("tokenizers", "text")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f'{path} cannot be read: {error.strerror}; give a tokenizer.json, "bytes" or "bpe"'
        ) from error
    try:
        tokenizer = library.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"{path} is no tokenizer.json: {' '.join(str(error).split())[:160]}; give a file that "
            'the tokenizers library has saved, or "bytes" or "bpe"'
        ) from error
    return BPETokenizer(tokenizer, str(path))


@dataclass(frozen=True)
class _Piece:
    document: Document
    text: str
    is_last: bool


# Between two lines that are not blank, GPT-2's rules and those after them never make one token.
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


def _pieces(document: Document) -> Iterator[_Piece]:
    text, start = _text(document), 0
    while end := _LINE_END.search(text, start + PIECE_CHARACTERS):
        yield _Piece(document, text[start : end.end()], is_last=False)
        start = end.end()
    yield _Piece(document, text[start:], is_last=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    characters = 0
    for document in documents:
        for piece in _pieces(document):
            batch.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


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
            f"{name} is not byte-level (its decoder: {', '.join(kinds)}), so how many bytes a "
            "token stands for is not known; give a byte-level one such as GPT-2's, Llama 3's or "
            'Qwen\'s, or use "bytes" or "bpe"'
        )
    if dropout := parts["model"].get("dropout"):
        raise DataError(
            f"{name} drops {dropout:.0%} of its merges at random, so that no two processes would "
            'see the same tokens; set "dropout" to null in it'
        )


def _find_end_of_text(tokenizer: "tokenizers.Tokenizer", name: str) -> int:
    for token in ENDS_OF_TEXT:
        if (found := tokenizer.token_to_id(token)) is not None:
            return found
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    raise DataError(
        f"{name} has no token for the end of a text: none of {' '.join(ENDS_OF_TEXT)} is among "
        f"its {len(special)} special tokens{': ' if special else ''}{' '.join(special[:16])}"
        f"{' ...' if special[16:] else ''}; add one of these to it"
    )


def _text_of_tokens(tokenizer: "tokenizers.Tokenizer") -> list[bytes]:
    """Bytes of each id; none for special tokens, and for ids that no token has."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    byte_of = {character: byte for byte, character in enumerate(_character_of_byte())}
    text = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        if token_id in added:
            text[token_id] = b"" if added[token_id].special else token.encode()
        elif all(character in byte_of for character in token):
            text[token_id] = bytes(byte_of[character] for character in token)
    return text


def _character_of_byte() -> list[str]:
    """How GPT-2 writes each byte in a vocabulary: a printable character for every one.

    Printable Latin-1 stands for itself; the others, in order, are what comes after Latin-1.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    printable |= set(range(ord("®"), ord("ÿ") + 1))
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _checked(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64)
    if array.size and not 0 <= array.min() <= array.max() < vocab_size:
        raise DataError(
            f"ids {array.min():,}..{array.max():,} are not all of a vocabulary of {vocab_size:,}; "
            "decode with the tokenizer that encoded"
        )
    return array
