"""Runs that several commands open."""

from pathlib import Path

import pytest
from support.recipe_runs import MLP, TINY_GPT2, Ended, train, write_texts


class Made(dict[str, Ended]):
    """Tiny runs in one folder, mlp on two devices and gpt2, each trained when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Ended:
        if name == "mlp":
            how = [*MLP, "--devices", "2", "--layout", "zero1", "--save-every", "3"]
        else:
            how = ["gpt2", *TINY_GPT2, "--data", str(write_texts(self.folder / "texts"))]
            how += ["--learning-rate", "1e-2", "--epochs", "3", "--devices", "1"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            self[name] = train(name, *how)
        return self[name]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("made"))


@pytest.fixture
def there(made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The same, from the folder above runs/."""
    monkeypatch.chdir(made.folder)
    return made
