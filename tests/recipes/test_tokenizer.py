"""Encoding is lossless and knows the bytes of each token; other tokenizers are refused."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.figures import assert_mentions, refused

from replicax.errors import ConfigError, DataError, MissingDependencyError
from replicax.recipes import tokenizer as module
from replicax.recipes.text_columns import Document
from replicax.recipes.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    open_tokenizer,
    train_bpe,
)

TEXT = "the hat, the cat; thé chat.\n\n  それは帽子です <|endoftext|> the </s> end\r\n" * 3
BPE = train_bpe([Document("text", TEXT.encode())], 300)
# Characters at random, and the strings where tokenizers go wrong.
TRAPS = ["<|endoftext|>", "</s>", "the", " ", "\n", "\r\n", "e\u0301", "Ġ", "▁", "\0", "\ufeff"]
TEXTS = st.lists(st.sampled_from(TRAPS) | st.text(max_size=5), max_size=12).map("".join)


def document(text: str) -> Document:
    return Document("a.txt", text.encode())


def agrees(tokenizer: Tokenizer, of: Document) -> np.ndarray:
    """Return the ids, after checks of what `Tokenizer` promises."""
    ids = tokenizer.encode(of)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.end_of_text not in ids
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[ids].sum() == len(of.content)
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    assert tokenizer.decode(ids) == of.content.decode(errors="replace")
    return ids


@given(TEXTS)
def test_bpe_gives_text_back_and_counts_its_bytes(text: str) -> None:
    agrees(BPE, document(text))


def test_special_tokens_have_no_text() -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        one, other = tokenizer.encode(document("one")), tokenizer.encode(document("other"))
        assert tokenizer.decode([*one, tokenizer.end_of_text, *other]) == "oneother"
        assert not tokenizer.token_bytes.flags.writeable


def test_the_tokens_of_half_a_character_decode_to_a_replacement() -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        assert tokenizer.decode(tokenizer.encode(document("a€"))[:-1]) == "a\ufffd"


def test_a_text_with_few_pairs_has_a_small_vocabulary_that_says_so() -> None:
    tokenizer = train_bpe([document("aaaa aaaa")], 1000)

    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == 260
    assert re.fullmatch(
        r"BPE trained\b.*, .* only 3 of the 743 .*\(vocabulary 260\)", tokenizer.name
    )


def test_training_is_deterministic() -> None:
    script = (
        "import sys\n"
        "from replicax.recipes.text_columns import Document\n"
        "from replicax.recipes.tokenizer import train_bpe\n"
        "content = sys.stdin.buffer.read()\n"
        "tokenizer = train_bpe([Document('text', content)], 300)\n"
        "print(*tokenizer.encode(Document('text', content)))"
    )
    there = subprocess.run(
        [sys.executable, "-c", script], input=TEXT.encode(), capture_output=True, check=True
    )

    assert there.stdout.decode().split() == [str(i) for i in BPE.encode(document(TEXT))]
    assert there.stderr == b""


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_all_documents_are_encoded_as_each_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [document(text) for text in ("", "the\ncat", TEXT, "", "x\ny\n\nz" * 20, "")]
    expected = [tokenizer.encode(d).tolist() for d in documents]
    for piece, batch in ((1, 1), (5, 3), (1000, 1), (3, 1000)):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", piece)
        monkeypatch.setattr(module, "PIECES_AT_ONCE", batch)
        assert [ids.tolist() for ids in tokenizer.encode_all(documents)] == expected


def test_a_document_that_is_not_utf8_is_an_error() -> None:
    bad = Document("latin.txt", "naïve".encode("latin-1"), offset=1000)
    for call in (lambda: BPE.encode(bad), lambda: train_bpe([bad], 300)):
        with refused(DataError, "latin.txt", "0xef", "1,002", '"bytes"'):
            call()
    agrees(ByteTokenizer(), bad)


def test_a_vocabulary_without_room_for_the_bytes_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"of 256 is too\b.*small: .* at least 257"):
        train_bpe([document(TEXT)], 256)

    smallest = train_bpe([document(TEXT)], 257)
    assert smallest.token_bytes.tolist().count(1) == 256
    assert len(agrees(smallest, document(TEXT))) == len(TEXT.encode())


def saved(path: Path, change: Callable[[dict[str, Any]], None] = lambda parts: None) -> Path:
    """BPE's tokenizer.json, with a change."""
    parts = copy.deepcopy(json.loads(BPE._tokenizer.to_str()))
    change(parts)
    path.write_text(json.dumps(parts))
    return path


def rename_end_of_text(parts: dict[str, Any]) -> None:
    parts["model"]["vocab"]["unused"] = parts["model"]["vocab"].pop("<|endoftext|>")


def added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **flags}


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        (["<eos>", "<|endoftext|>", "</s>"], "<|endoftext|>"),
        (["<eos>", "<|end_of_text|>", "</s>"], "</s>"),
        (["<eos>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<pad>", "<eos>"], "<eos>"),
    ],
)
def test_the_end_of_text_is_the_first_known(tmp_path: Path, has: list[str], expected: str) -> None:
    def change(parts: dict[str, Any]) -> None:
        rename_end_of_text(parts)
        parts["added_tokens"] = [added(300 + i, t, special=True) for i, t in enumerate(has)]

    loaded = load_tokenizer(saved(tmp_path / "tokenizer.json", change))

    assert loaded.end_of_text == 300 + has.index(expected)
    assert loaded.vocab_size == 300 + len(has)
    assert loaded.token_bytes[300:].tolist() == [0] * len(has)
    agrees(loaded, document(TEXT + expected))


def test_a_vocabulary_may_have_holes(tmp_path: Path) -> None:
    def change(parts: dict[str, Any]) -> None:
        parts["model"]["vocab"]["ĠĠ"] = 305

    loaded = load_tokenizer(saved(tmp_path / "tokenizer.json", change))

    assert loaded.vocab_size == 306
    assert loaded.token_bytes[300:].tolist() == [0, 0, 0, 0, 0, 2]
    agrees(loaded, document(TEXT))


def test_added_tokens_that_are_not_special_stand_for_their_text(tmp_path: Path) -> None:
    def change(parts: dict[str, Any]) -> None:
        parts["added_tokens"].append(added(300, "   帽", special=False))

    loaded = load_tokenizer(saved(tmp_path / "tokenizer.json", change))

    assert agrees(loaded, document("a   帽b")).tolist()[1] == 300
    assert loaded.token_bytes[300] == 6


def test_truncation_and_padding_are_left_off(tmp_path: Path) -> None:
    def change(parts: dict[str, Any]) -> None:
        shorten = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        pad = {"strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None}
        parts["truncation"] = shorten
        parts["padding"] = {**pad, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}

    loaded = load_tokenizer(saved(tmp_path / "tokenizer.json", change))

    assert len(agrees(loaded, document(TEXT))) == len(BPE.encode(document(TEXT)))


def normalizer(kind: str) -> Callable[[dict[str, Any]], None]:
    return lambda parts: parts.update(normalizer={"type": kind})


def prefix_space(parts: dict[str, Any]) -> None:
    parts["pre_tokenizer"]["add_prefix_space"] = True


def no_letter_z(parts: dict[str, Any]) -> None:
    del parts["model"]["vocab"]["z"]


def end_that_is_not_special(parts: dict[str, Any]) -> None:
    parts["added_tokens"][0]["special"] = False


@pytest.mark.parametrize(
    ("change", "text", "at", "was", "became"),
    [
        (normalizer("Lowercase"), "two Words", 4, b"Words", b"words"),
        (normalizer("NFC"), "cafe\u0301s", 3, b"e\xcc\x81s", b"\xc3\xa9s"),
        (prefix_space, "word", 0, b"word", b" word"),
        (no_letter_z, "pizza pie", 2, b"zza pie", b"a pie"),
        (end_that_is_not_special, "a<|endoftext|>", 1, b"<|endoft", b""),
    ],
)
def test_a_tokenizer_that_changes_text_is_refused_with_the_text(
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    text: str,
    at: int,
    was: bytes,
    became: bytes,
) -> None:
    loaded = load_tokenizer(saved(tmp_path / "tokenizer.json", change))

    with pytest.raises(DataError) as caught:
        loaded.encode(Document("a.txt", text.encode(), offset=1000))

    message = str(caught.value)
    assert re.match(rf"a\.txt is .*by {re.escape(loaded.name)}: from byte", message)
    assert_mentions(
        message, f"from byte {1000 + at:,} on, {was!r} became {became!r}; ", "must preserve"
    )


def decoder(**parts_of: Any) -> Callable[[dict[str, Any]], None]:
    return lambda parts: parts.update(decoder=parts_of or None)


def dropout(parts: dict[str, Any]) -> None:
    parts["model"]["dropout"] = 0.1


def no_end_of_text(parts: dict[str, Any]) -> None:
    rename_end_of_text(parts)
    parts["added_tokens"] = [added(300, "<pad>", special=True), added(301, "xx", special=False)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (decoder(), " is not byte-level (its decoder: none)"),
        (
            decoder(type="Sequence", decoders=[{"type": "ByteFallback"}, {"type": "Fuse"}]),
            " is not byte-level (its decoder: ByteFallback, Fuse)",
        ),
        (dropout, " drops 10% of its merges"),
        (no_end_of_text, " has no end-of-text token: "),
        (lambda parts: parts.pop("model"), " is not a tokenizer.json: "),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    path = saved(tmp_path / "tokenizer.json", change)

    with pytest.raises(DataError) as caught:
        load_tokenizer(path)

    assert str(caught.value).startswith(f"{path}{words}")
    assert "\n" not in str(caught.value)


def test_a_byte_level_decoder_may_be_one_of_several(tmp_path: Path) -> None:
    change = decoder(type="Sequence", decoders=[{"type": "Fuse"}, BYTE_LEVEL])

    agrees(load_tokenizer(saved(tmp_path / "tokenizer.json", change)), document(TEXT))


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"version": "1.0"', b"\0" * 100])
def test_what_is_no_tokenizer_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)

    with pytest.raises(DataError) as caught:
        load_tokenizer(path)

    message = str(caught.value)
    assert message.startswith(f"{path} is no")
    assert message.endswith('library, or "bytes" or "bpe"')
    assert "\n" not in message


def test_a_tokenizer_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path, why in {
        tmp_path / "nowhere": "No such file or directory",
        tmp_path: "Is a directory",
    }.items():
        with pytest.raises(DataError) as caught:
            load_tokenizer(path)
        assert re.match(rf"{re.escape(str(path))} .*read: {re.escape(why)}; use", str(caught.value))
        assert str(caught.value).endswith('tokenizer.json, "bytes" or "bpe"')


def test_opening_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [document(TEXT)]
    path = saved(tmp_path / "tokenizer.json")

    assert isinstance(open_tokenizer("bytes", documents), ByteTokenizer)
    assert open_tokenizer("bytes", documents, 257).vocab_size == 257
    assert open_tokenizer("bpe", documents, 280).vocab_size == 280
    monkeypatch.setattr(module, "TRAINED_VOCAB_SIZE", 290)
    assert open_tokenizer("bpe", documents).vocab_size == 290
    loaded = open_tokenizer(str(path), documents, 300)
    assert isinstance(loaded, BPETokenizer)
    assert loaded.vocab_size == 300


def test_a_wrong_name_or_size_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "tokenizer.json")
    for spec, vocab_size, words in (
        ("byts", None, ["'byts'", "did you mean 'bytes'?"]),
        ("bytes", 4096, ["4,096", "bytes (vocabulary 257)", '"bpe"']),
        (str(path), 299, ["299", f"{path} (vocabulary 300)", '"bpe"']),
    ):
        with refused(ConfigError, *words):
            open_tokenizer(spec, [], vocab_size)


def test_only_bytes_work_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    assert open_tokenizer("bytes", []).vocab_size == 257
    for spec in ("bpe", str(path)):
        with pytest.raises(MissingDependencyError, match=r"pip install .*\[text\]'"):
            open_tokenizer(spec, [document(TEXT)])
