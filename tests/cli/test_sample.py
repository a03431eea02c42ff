"""`replicax sample`: a text, continued as the recipe continues it after training."""

import dataclasses
import shutil
from pathlib import Path

from support.command_line import Main, done, refusal
from support.recipe_runs import TINY_GPT2, Ended, train, write_texts
from support.tiers import EXHAUSTIVE

import replicax as rx


def test_it_is_what_the_recipe_says_after_training(main: Main, there: dict[str, Ended]) -> None:
    run = rx.load(there["gpt2"].folder)
    out = done(main, "sample", "gpt2", "one two ", "--tokens", "12", "--temperature", "0")
    asked = {"sample": "one two ", "sample_tokens": 12, "temperature": 0.0}
    assert out == f"{dataclasses.replace(run.recipe, **asked).after_training(run.model)}\n"
    assert len(out) > len("one two \n")


def test_the_seed_decides(main: Main, there: dict[str, Ended]) -> None:
    name = there["gpt2"].folder.name
    drawn = [
        main("sample", name, "one", "--temperature", "3", "--seed", seed)[1] for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@EXHAUSTIVE
def test_a_tokenizer_trained_on_another_text_is_refused(main: Main, folder: Path) -> None:
    texts = write_texts(folder / "texts")
    how = ["--data", texts, "--tokenizer", "bpe", "--vocab-size", "265", "--steps", "1"]
    train("bpe", "gpt2", *TINY_GPT2, *how)
    out = done(main, "sample", "bpe", "one", "--tokens", "3")
    assert out.startswith("one")
    shutil.rmtree(texts)
    texts = write_texts(folder / "texts")
    for path in texts.iterdir():
        path.write_bytes(path.read_bytes().upper())
    assert "bpe" in refusal(main, "sample", "bpe", "one")
