"""Open MPI on this host."""

import shutil


def missing_openmpi() -> str | None:
    """Why Open MPI cannot run here, in words."""
    if shutil.which("mpirun") is None:
        return "mpirun not installed (Debian: apt-get install openmpi-bin)"
    return None


def mpirun(processes: int) -> list[str]:
    """The command that starts `processes` on this host, to be followed by theirs."""
    return [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(processes),
    ]
