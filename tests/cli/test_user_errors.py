"""A user's error is one line and exit code 2."""

from pathlib import Path

import pytest
from support.command_line import RECIPE, REGRESSION, Main, one_line, refusal
from support.figures import assert_mentions

from replicax.core.first_step import memory_check


def test_an_island_has_to_name_its_run(
    main: Main, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAX_ISLAND", "1")
    monkeypatch.setenv("REPLICAX_ISLANDS", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3")
    monkeypatch.setenv("REPLICAX_SECRET", "s")
    assert_mentions(refusal(main, *REGRESSION), "island 1 of 3", "--run")
    assert not (folder / "runs").exists()


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
