"""A user's error is one line and exit code 2."""

from pathlib import Path

import pytest
from support.command_line import RECIPE, REGRESSION, Main, one_line, refusal
from support.figures import assert_mentions

from replicax.core.first_step import memory_check


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["'trian'", "train, evaluate, sample, ", "mean 'train'"]),
        (["train"], ["needs a recipe", "replicax recipes"]),
        (["train", "--devices", "2"], ["needs a recipe", "replicax recipes"]),
        (["train", "linear_regresion"], ["'linear_regresion'", "mean 'linear_regression'"]),
        (["train", "no_such.py:Mine"], ["no_such.py is", "file"]),
        (["train", "no_such_module:Mine"], ["no module 'no_such_module'"]),
        (["train", ":Mine"], ["file.py:Name"]),
        (["recipes", "extra"], ["'extra'"]),
        ([*REGRESSION, "--epocs", "3"], ["'--epocs'", "mean '--epochs'", "--help"]),
        ([*REGRESSION, "--learning-rte=3"], ["'--learning-rte=3'", "mean '--learning-rate'"]),
        ([*REGRESSION, "--preset", "seed"], ["'--preset'", "no presets"]),
        ([*REGRESSION, "--preset=seed"], ["'--preset'", "no presets"]),
        (["train", "mlp", "--preset", "sead"], ["'sead'", "MLP are seed", "mean 'seed'"]),
        (["train", "mlp", "--preset=zzz"], ["'zzz'", "MLP are seed"]),
        (["train", "mlp", "--preset"], ["--preset without", "seed"]),
        (["train", "mlp", "--preset="], ["--preset without", "seed"]),
        (["train", "mlp", "--preset", "--steps", "1"], ["--preset without", "seed"]),
        (["train", "mlp", "--preset", "seed", "--preset=seed"], ["--preset", "2 times", "one"]),
        (["train", "mlp", "--prest", "seed"], ["'--prest'", "mean '--preset'"]),
        ([*REGRESSION, "--zzz"], ["'--zzz'", "--help"]),
        ([*REGRESSION, "stray"], ["'stray'", "--help"]),
        ([*REGRESSION, "--points", "many"], ["--points", "'many'", "--help"]),
        ([*REGRESSION, "--learning-rate", "x"], ["--learning-rate", "'x'", "--help"]),
        ([*REGRESSION, "--points"], ["--points", "--help"]),
        ([*REGRESSION, "--mode", "both"], ["'both'", "--mode", "jit", "shard_map", "--help"]),
        ([*REGRESSION, "--layout", "fdsp"], ["'fdsp'", "--layout", "fsdp", "--help"]),
        ([*REGRESSION, "--precision", "float8"], ["'float8'", "bfloat16", "--help"]),
        ([*REGRESSION, "--mode", "exact", "--layout", "fsdp"], ["exact", "fsdp", "'jit'"]),
        ([*REGRESSION, "--mode", "pmap", "--layout", "zero1"], ["pmap", "zero1", "'jit'"]),
        ([*REGRESSION, "--mode", "single", "--devices", "2"], ["single", "2 devices", "1"]),
        ([*REGRESSION, "--devices", "16"], ["16", "8 attached", "at most 8"]),
        ([*REGRESSION, "--devices", "0"], ["--devices 0", "at least 1"]),
        ([*REGRESSION, "--devices", "-1"], ["--devices -1", "at least 1"]),
        ([*REGRESSION, "--batch-size", "0"], ["--batch-size 0", "at least 1"]),
        ([*REGRESSION, "--batch-size", "-8"], ["--batch-size -8", "at least 1"]),
        ([*REGRESSION, "--batch-size", "7"], ["7 rows", "8 replicas", "at least 8"]),
        ([*REGRESSION, "--batch-size", "16", "--accumulate", "4"], ["16 rows", "4 micro", "32"]),
        ([*REGRESSION, "--accumulate", "0"], ["--accumulate 0", "at least 1"]),
        ([*REGRESSION, "--points", "0"], ["--points 0"]),
        ([*REGRESSION, "--steps", "0"], ["--steps 0", "at least 1"]),
        ([*REGRESSION, "--epochs", "0"], ["--epochs 0", "at least 1"]),
        ([*REGRESSION, "--log-every", "0"], ["--log-every 0", "at least 1"]),
        ([*REGRESSION, "--seed", "-1"], ["--seed -1", "at least 0"]),
    ],
    ids=lambda value: " ".join(value[1:]).replace("linear_regression --points 48", "…")[:48],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    arguments: list[str], words: list[str], main: Main, folder: Path
) -> None:
    line = refusal(main, *arguments)
    assert [word for word in words if word not in line] == []
    assert not (folder / "runs").exists()


def test_an_island_has_to_name_its_run(
    main: Main, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAX_ISLAND", "1")
    monkeypatch.setenv("REPLICAX_ISLANDS", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3")
    monkeypatch.setenv("REPLICAX_SECRET", "s")
    assert_mentions(refusal(main, *REGRESSION), "island 1 of 3", "--run")
    assert not (folder / "runs").exists()


HALF = """
import dataclasses
@dataclasses.dataclass
class Half:
    batch_size: int = 8
class Plain:
    batch_size = 8
    epochs = 1
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (":Mime", ["no class 'Mime'", "mean 'Mine'"]),
        (":Half", ["Half", "lacks epochs, model, loss", "methods"]),
        (":Plain", ["Plain", "dataclass"]),
    ],
)
def test_a_file_without_the_recipe_is_a_user_error(
    name: str, words: list[str], main: Main, folder: Path
) -> None:
    (folder / "my_recipe.py").write_text(RECIPE + HALF)
    line = refusal(main, "train", f"my_recipe.py{name}")
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x08\x03 and no images"])
def test_a_corrupt_data_file_is_a_user_error(content: bytes, main: Main, folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    for split in ("train", "t10k"):
        (data / f"{split}-images-idx3-ubyte").write_bytes(content)
        (data / f"{split}-labels-idx1-ubyte").write_bytes(content)
    code, _, err = main("train", "cnn", "--data-dir", data)
    assert code == 2
    assert "train-images-idx3-ubyte" in one_line(err)
    assert "corrupt" in err


def test_a_missing_data_file_is_a_user_error(main: Main, folder: Path) -> None:
    assert "missing" in refusal(main, "train", "cnn", "--data-dir", folder / "nowhere")


REFUSED = """
    def model(self, key):
        raise RuntimeError("RESOURCE_EXHAUSTED: %s.\\nThis is how: ...")
"""


@pytest.mark.parametrize(
    "said",
    [
        "Out of memory allocating 43200000900 bytes",
        "Out of memory while trying to allocate 745.06GiB",
        "Unable to allocate 745. GiB for an array with shape (10,) and data type float32",
    ],
)
def test_what_an_allocator_refuses_is_one_line(said: str, main: Main, folder: Path) -> None:
    (folder / "my_recipe.py").write_text(RECIPE + REFUSED % said)
    code, _, err = main("train", "my_recipe.py:Mine")
    assert code == 1
    line = one_line(err)
    assert f"replicax: {said}; " in line
    assert "lower --batch-size" in line


def test_a_step_that_cannot_fit_is_refused_before_it_runs(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "free_host_bytes", lambda: 400)
    line = refusal(main, *REGRESSION, "--run", "it")
    assert_mentions(line, "step of 64 rows", "8 host devices", "lower the", "batch size")
