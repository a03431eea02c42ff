"""Runs of strangers: their folders are data, and their code never runs."""

import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
from support.command_line import Main, done, refusal
from support.recipe_runs import Ended
from support.saved_checkpoint import data_file

from replicax.train.checkpoints.manifest import read_manifest, write_manifest
from replicax.train.files.places import write_whole

HARM = "from pathlib import Path\nPath('harm').touch()\n"


def gift(made: Ended, recipe: str) -> Path:
    """A run in runs/gift whose files ask for `recipe`, beside code of that name."""
    folder = Path("runs/gift")
    shutil.copytree(made.folder, folder)
    checkpoint = max((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    manifest = read_manifest(checkpoint)
    write_manifest(
        checkpoint, dataclasses.replace(manifest, config={**manifest.config, "recipe": recipe})
    )
    for path in (Path("runs/code.py"), folder / "code.py", Path("my_module.py")):
        path.write_text(HARM)
    (folder / "link.py").symlink_to("../code.py")
    return checkpoint


@pytest.mark.promise("outside.no-harm-by-a-folder")
@pytest.mark.parametrize(
    "recipe",
    [
        *("runs/code.py:X", "runs/gift/code.py:X", "runs/gift/link.py", "{here}/runs/code.py:X"),
        *("runs.gift.code:X", "my_module:X", "antigravity:X", "mlp.py:MLP"),
    ],
)
def test_no_code_is_run_that_only_a_folder_names(
    recipe: str, main: Main, made: dict[str, Ended], folder: Path
) -> None:
    recipe = recipe.format(here=folder)
    gift(made["mlp"], recipe)
    for command in (["evaluate", "gift"], ["sample", "gift", "text"], ["export", "gift", "file"]):
        line = refusal(main, *command)
        assert recipe in line
        assert "--recipe" in line
    assert not (folder / "harm").exists()
    assert not (folder / "file").exists()


def test_code_that_the_user_names_is_run(main: Main, made: dict[str, Ended], folder: Path) -> None:
    gift(made["mlp"], "runs/gift/code.py:X")
    Path("my_recipe.py").write_text(
        "import dataclasses\nfrom replicax.recipes.mlp import MLP\n"
        "@dataclasses.dataclass(frozen=True)\nclass Mine(MLP): 'Mine.'\n"
    )
    out = done(main, "evaluate", "gift", "--recipe", "my_recipe.py:Mine")
    assert "Mine" in out
    assert not (folder / "harm").exists()


@pytest.mark.promise("outside.no-harm-by-a-folder")
def test_nothing_is_unpickled(
    main: Main, made: dict[str, Ended], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gift(made["mlp"], "mlp")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "_loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert main("evaluate", "gift")[0] == 0
    assert main("export", "gift", "file")[0] == 0
    assert main("runs")[0] == 0


def test_damage_is_found_and_a_link_is_refused(
    main: Main, made: dict[str, Ended], folder: Path
) -> None:
    checkpoint = gift(made["mlp"], "mlp")
    assert main("evaluate", "gift")[0] == 0
    outside = Path(shutil.move(checkpoint, folder / "outside"))
    checkpoint.symlink_to(outside)
    assert main("evaluate", "gift")[0] == 1
    checkpoint.unlink()
    shutil.move(outside, checkpoint)
    file = data_file(checkpoint)
    write_whole(file, bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    code, _, err = main("evaluate", "gift")
    assert code == 1
    assert file.relative_to(checkpoint).as_posix() in err
