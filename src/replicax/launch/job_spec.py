"""The specification of a job to start."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """One command, as several processes that train together.

    Args:
        command: the program and its arguments, the same for each process.
        processes: how many; at least 1.
        devices_per_process: host devices that each process makes; None leaves it to the platform.
        pin: each process gets cores of its own.
        restarts: how often all are started again after a failure.
        name: what an engine calls the job.
    """

    command: tuple[str, ...]
    processes: int
    devices_per_process: int | None = None
    pin: bool = False
    restarts: int = 0
    name: str = "replicax"
