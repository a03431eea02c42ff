"""The specification of a job to start."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """One command, run as several processes that train together.

    Args:
        command: the program and its arguments, the same for each process.
        processes: the number of processes, of each island if there are several; at least 1.
        devices_per_process: CPU devices that each process simulates; None for JAX's default.
        pin: whether each process is pinned to its own CPU cores.
        restarts: the number of restarts of the whole job after a failure; of an island, those in a
            row soon after its start.
        name: the name of the job in the engine.
        islands: the number of islands, each of which is started again by itself; None for a job
            that restarts as a whole.
    """

    command: tuple[str, ...]
    processes: int
    devices_per_process: int | None = None
    pin: bool = False
    restarts: int = 0
    name: str = "replicax"
    islands: int | None = None
