"""Folders of compiled programs: those of killed launchers go, and no others."""

import os
import tempfile
from pathlib import Path

import pytest

from replicax.launch import compiled_folder


def test_what_a_killed_launcher_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, precious = tmp_path / "replicax-compiled-left", tmp_path / "precious"
    with compiled_folder.compiled_folder() as used:
        assert os.stat(used).st_mode & 0o777 == 0o700
        for path in (left, precious):
            path.mkdir()
            (path / "file").touch()
        (tmp_path / "replicax-compiled-link").symlink_to(precious)
        with compiled_folder.compiled_folder():
            assert left.exists()  # it may be about to be locked
        monkeypatch.setattr(compiled_folder, "_OLD_SECONDS", -1.0)
        with compiled_folder.compiled_folder() as another:
            kept = {path.name for path in tmp_path.iterdir() if path.is_dir()}
        assert kept == {Path(used).name, Path(another).name, "precious", "replicax-compiled-link"}
        assert (precious / "file").exists()
    assert not Path(used).exists()
