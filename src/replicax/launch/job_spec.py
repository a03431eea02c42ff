"""The specification of a job to start."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """One command, run as several processes that train together.

    Args:
        command: the program and its arguments, the same for each process.
        processes: the number of processes; at least 1.
        devices_per_process: CPU devices that each process simulates; None for JAX's default.
        pin: whether each process is pinned to its own CPU cores.
        restarts: the number of restarts of the whole job after a failure.
        name: the name of the job in the engine.
    """

    command: tuple[str, ...]
    processes: int
    devices_per_process: int | None = None
    pin: bool = False
    restarts: int = 0
    name: str = "replicax"
