"""A user's program passes pyright at its strictest; `make check` reads it with mypy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.exhaustive
def test_pyright_accepts_and_refuses_what_mypy_does(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="no pyright: `make peers` installs it")
    settings = {
        "include": [str(ROOT / "tests/support/typed_program.py")],
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.11",
        "typeCheckingMode": "strict",
        "enableTypeIgnoreComments": False,  # those are mypy's
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", tmp_path, "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("0 errors"), done.stdout + done.stderr
