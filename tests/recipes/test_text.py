"""From files to rows of tokens, with the counts that are printed."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.figures import assert_mentions, figures
from support.tiers import EXHAUSTIVE

from replicax.errors import DataError
from replicax.recipes import text as module
from replicax.recipes.text import TextDataset, text_dataset

LINE = b"the cat and the hat\n"  # 20 bytes, of which the last is held out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """21 documents, the one before the last held out."""
    for i in range(21):
        (tmp_path / f"{i:02}.txt").write_bytes(b"held out" if i == 19 else LINE)
    return tmp_path


def targets(rows: dict[str, np.ndarray]) -> list[int]:
    context = rows["tokens"].shape[1] - 1
    real = np.arange(context) < rows["length"][:, None]
    return [int(rows["tokens"][0, 0]), *map(int, rows["tokens"][:, 1:][real])]


def test_bytes(folder: Path) -> None:
    data = text_dataset([folder], "bytes", None, context=100)

    assert data.source.startswith(
        f"{folder}: 21 files, 408 bytes; bytes (vocabulary 257); 420 training"
    )
    assert data.source.endswith("9 held out")
    assert targets(data.train) == [*LINE, 256] * 20
    assert targets(data.heldout) == [*b"held out", 256]
    assert data.train["tokens"].shape == (5, 101)
    # shorter than a context, and still a row
    assert data.heldout["tokens"].shape == (1, 101)
    assert data.heldout["length"].tolist() == [8]


def test_bpe_learns_from_the_training_documents_alone(folder: Path) -> None:
    data = text_dataset([folder], "bpe", 1000, context=8)

    tokenizer = data.tokenizer
    held_out = targets(data.heldout)
    assert tokenizer.decode(held_out) == "held out"
    # the only pair seen in training: "h" and "e"
    assert len(held_out) == len("held out") - 1 + 1
    assert tokenizer.decode(targets(data.train)) == LINE.decode() * 20
    assert tokenizer.name in data.source
    assert_mentions(data.source, f"{len(targets(data.train))} training", ", 8 held out")


def test_a_context_that_the_training_text_does_not_fill_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(LINE * 50)

    assert text_dataset([path], "bytes", None, context=950).train["length"].tolist() == [950]
    with pytest.raises(DataError) as caught:
        text_dataset([path], "bytes", None, context=951)
    assert figures(str(caught.value)) == ["951", "952", "951"]


def test_what_takes_long_is_announced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def said(spec: str) -> str:
        assert isinstance(text_dataset([folder], spec, None, context=8), TextDataset)
        out, err = capfd.readouterr()
        assert out == ""
        return err

    assert said("bpe") == said("bytes") == ""
    monkeypatch.setattr(module, "BPE_TRAINING_BYTES_PER_SECOND", 399)
    assert re.fullmatch(r"training .*BPE .* 0\.0 MB\n", said("bpe"))
    monkeypatch.setattr(module, "BPE_ENCODING_BYTES_PER_SECOND", 407)
    assert re.fullmatch(r"training .*BPE .* 0\.0 MB\nencoding 0\.0 MB\n", said("bpe"))
    assert said("bytes") == ""
    monkeypatch.setattr(module, "BYTES_ENCODING_BYTES_PER_SECOND", 407)
    assert said("bytes") == "encoding 0.0 MB\n"


@EXHAUSTIVE
def test_the_standard_library_with_bpe() -> None:
    data = text_dataset([], "bpe", 1024, context=256)

    tokens = data.train["tokens"]
    bytes_per_token = data.tokenizer.token_bytes[tokens].mean()
    assert tokens.dtype == np.uint16
    assert 2.5 < bytes_per_token < 5
