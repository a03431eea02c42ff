"""Runs that several commands open."""

from pathlib import Path

import pytest
from support.recipe_runs import MLP, TINY_GPT2, Ended, train, write_texts


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """A tiny run of mlp on two devices, and one of gpt2, in one folder."""
    folder: Path = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        texts = write_texts(folder / "texts")
        how = ["--devices", "2", "--layout", "zero1", "--save-every", "3"]
        found = {"mlp": train("mlp", *MLP, *how)}
        how = ["--data", texts, "--learning-rate", "1e-2", "--epochs", "3", "--devices", "1"]
        found["gpt2"] = train("gpt2", "gpt2", *TINY_GPT2, *how)
    return found


@pytest.fixture
def there(
    made: dict[str, Ended], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Ended]:
    """The same, from the folder above runs/."""
    monkeypatch.chdir(made["mlp"].folder.parents[1])
    return made
