"""Commands run for the tests, with the time they took and what they printed."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = sys.executable
REPLICAX = str(Path(PYTHON).with_name("replicax"))
SECONDS = 240


def run(
    command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run in `folder` to the end, on the CPU; `env` is added to this process's."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**_outside(), "JAX_PLATFORMS": "cpu", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Everything that was printed, for the message of a test that fails."""
    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def _outside() -> dict[str, str]:
    """Return this environment without the variables that engines set for the tests."""
    engines = ("SLURM_", "OMPI_", "PMIX_", "RAY_", "REPLICAX_", "JAX_")
    return {name: value for name, value in os.environ.items() if not name.startswith(engines)}
