"""Text from columns of tables, mixtures of sources, and documents that are kept apart."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.errors import ConfigError, DataError
from replicax.recipes import transformer
from replicax.recipes.corpus import read_corpus
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.text import mixed, text_dataset
from replicax.recipes.tokenizer import train_bpe

TEXTS = [f"{number} bottles of beer on the wall" for number in range(30)]
# dill, with which datasets hashes functions.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot (locate|pickle)")
HOW = "datasets is not installed: `make peers` installs it"


def lines(path: Path, texts: list[Any], column: str = "text") -> Path:
    path.write_text("\n\n".join(json.dumps({"id": 1, column: text}) for text in texts))
    return path


def contents(path: Path, column: str = "text") -> list[str]:
    return [each.content.decode() for each in read_corpus(path, column).documents]


def test_each_line_of_a_column_is_a_document(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", ["one", "", "two\n\u00e9"], "body")
    assert contents(tmp_path / "a.jsonl", "body") == ["one", "two\n\u00e9"]
    found = read_corpus(tmp_path / "a.jsonl", "body")
    assert found.source == f"{tmp_path}/a.jsonl: 2 documents, 9 bytes"
    assert found.documents[1].name == f"{tmp_path}/a.jsonl:5"
    (tmp_path / "b.txt").write_text("three")
    assert contents(tmp_path, "body") == ["one", "two\n\u00e9", "three"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"id": 1, "body": 2}', [":2 ", "'text'", "id, body", "--column"]),
        (b'{"text": 3}', [":1 ", "int"]),
        (b'["text"]', [":1 ", "none"]),
        (b'{"text": "a"', [":1 ", "JSON"]),
        pytest.param(b"[" * 100_000, [":1 ", "JSON"], id="nested deeply"),
    ],
)
def test_a_line_without_text_is_told(content: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_corpus(tmp_path / "a.jsonl")
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl{words[0]}")
    assert all(word in str(caught.value) for word in words)


@EXHAUSTIVE
def test_datasets_and_parquet_files_have_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason=HOW)
    table = datasets.Dataset.from_dict({"text": TEXTS, "id": range(30)})
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "table.parquet")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    for name in ("saved", "table.parquet", "splits/train"):
        assert contents(tmp_path / name) == TEXTS
        with pytest.raises(DataError, match="text, id"):
            read_corpus(tmp_path / name, "body")
    with pytest.raises(DataError, match="splits/train"):
        read_corpus(tmp_path / "splits")


def rows(count: int, first: int) -> dict[str, np.ndarray]:
    return {"tokens": first + np.arange(count), "length": np.ones(count)}


@pytest.mark.parametrize(("a", "b", "weights"), [(70, 30, (3, 1)), (5, 40, (0.5, 0.5))])
def test_a_mixture_has_its_shares_and_loses_no_row_of_the_longest(
    a: int, b: int, weights: tuple[float, float]
) -> None:
    mixture, times = mixed([rows(a, 0), rows(b, 1000)], weights)
    drawn = [int(mixture[at]["tokens"]) for at in range(len(mixture))]
    of_first = np.array(drawn) < 1000
    share = weights[0] / sum(weights)
    assert abs(of_first.mean() - share) < 1 / len(drawn) + 1e-9
    assert abs(of_first[: len(drawn) // 2].mean() - share) < 0.1
    counts = Counter(drawn)
    longest = max((0, a), (1000, b), key=lambda part: times[part[0] // 1000] == 1)
    assert [counts[longest[0] + row] for row in range(longest[1])] == [1] * longest[1]
    again, _ = mixed([rows(a, 0), rows(b, 1000)], weights)
    assert drawn == [int(again[at]["tokens"]) for at in range(len(again))]


def test_weights_are_positive_and_one_for_each_source(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", TEXTS)
    for weights in ([1.0], [1.0, 0.0]):
        with pytest.raises(ConfigError, match="--data-weights"):
            text_dataset([path, path], "bytes", None, 8, weights=weights)
    twice = text_dataset([path, path], "bytes", None, 8)
    assert twice.train_rows == pytest.approx(
        2 * text_dataset([path], "bytes", None, 8).train_rows, abs=1
    )


def test_documents_kept_apart_are_those_alone() -> None:
    """Logits of a packed row are those of each document in a row of its own."""
    end, vocab, heads = 9, 10, 2
    params = transformer.init(transformer.Shape(1, heads, 8, 12, vocab), jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: leaf + 0.5 * jnp.sin(jnp.arange(leaf.size) * 1.7).reshape(leaf.shape), params
    )
    documents = [[1, 2, 3], [end, 4, 5, 1, 7], [end, 8, 1]]
    logits = jax.jit(transformer.logits, static_argnames=("heads", "separator"))
    packed = jnp.array([[token for each in documents for token in each]])
    found = logits(params, packed, heads=heads, separator=end)[0]
    padded = jnp.array([[*each, *[0] * (5 - len(each))] for each in documents])
    alone = logits(params, padded, heads=heads)
    alone = jnp.concatenate([row[: len(each)] for row, each in zip(alone, documents, strict=True)])
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
    assert abs(found - logits(params, packed, heads=heads)[0]).max() > 1e-3


def test_a_step_on_a_mixture_has_the_loss_of_one_device(tmp_path: Path) -> None:
    paths = tuple(lines(tmp_path / f"{name}.jsonl", TEXTS, "body") for name in "ab")
    tokenizer = train_bpe(read_corpus(paths[0], "body").documents, 280)
    tokenizer._tokenizer.save(str(tmp_path / "tokenizer.json"))
    recipe = GPT2(
        data=paths,
        data_weights=(0.7, 0.3),
        column="body",
        tokenizer=str(tmp_path / "tokenizer.json"),
        separate_documents=True,
        layers=1,
        heads=2,
        width=16,
        context=16,
    )
    assert all(words in recipe.data_description() for words in ("a.jsonl x 2.3", "b.jsonl x 1"))
    model, mesh = recipe.model(jax.random.key(0)), rx.make_mesh(2)
    dp = rx.DataParallel(recipe.loss, optax.sgd(0.1), mesh=mesh, mode="shard_map", donate=False)
    batch = next(iter(dp.feed(recipe.train_source(), 16, shuffle=True)))
    _, metrics = dp.step(dp.init(model), batch)
    nats, _ = jax.jit(recipe.loss)(model, jax.tree.map(np.asarray, batch.data), None)
    expected = jnp.average(nats.values, weights=nats.weights)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


PAGE = Path(__file__).parents[2] / "docs/text.md"


@pytest.mark.parametrize("reader", ["a list", pytest.param("datasets", marks=EXHAUSTIVE)])
def test_the_page_packs_and_mixes_rows(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {name: [{"text": f"{name} {text}"} for text in TEXTS] for name in ("news", "code")}
    if reader == "datasets":
        datasets = pytest.importorskip("datasets", reason=HOW)
        for name, table in tables.items():
            datasets.Dataset.from_list(table).save_to_disk(name)
    else:
        read = SimpleNamespace(load_from_disk=tables.__getitem__)
        monkeypatch.setitem(sys.modules, "datasets", read)
    documents = read_corpus(lines(tmp_path / "all.jsonl", ["news code", *TEXTS])).documents
    train_bpe(documents, 300)._tokenizer.save("tokenizer.json")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(code.replace("context=1024", "context=32"), names)
    batch = next(iter(names["source"].batch(16)))
    assert {name: each.shape for name, each in batch.items()} == {
        "tokens": (16, 33),
        "tokens_segment_ids": (16, 33),
        "tokens_positions": (16, 33),
    }
    begun = batch["tokens"][:, 1:] == names["end"]
    assert begun.any()
    np.testing.assert_array_equal(begun, batch["tokens_positions"][:, 1:] == 0)
    texts = names["tokenizer"].decode_batch(batch["tokens"].tolist())
    news = sum("news" in text for text in texts)
    assert news == 12  # 7 of 10, and 5 of the next 6
