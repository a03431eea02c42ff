"""Open MPI on this host."""

import shutil


def missing_openmpi() -> str | None:
    """Return why Open MPI cannot run here."""
    if shutil.which("mpirun") is None:
        return "mpirun not installed (Debian: apt-get install openmpi-bin)"
    return None


def mpirun(processes: int) -> list[str]:
    """Return the command prefix that starts `processes` on this host."""
    return [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(processes),
    ]
