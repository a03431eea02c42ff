"""Everything that the processes of one launch share."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax.launch.job_spec import JobSpec
from replicax.launch.process import ProcessStart, free_port


@dataclasses.dataclass(frozen=True)
class LaunchContext:
    """A job on this host, and what its processes share."""

    job: JobSpec
    job_id: str
    secret: str = dataclasses.field(repr=False)
    env: Mapping[str, str] = dataclasses.field(repr=False)
    """The environment of all processes."""
    folder: Path
    """The folder of their logs."""
    cores: Sequence[Sequence[int]]
    """Cores of each process, in the order of the rows of the output."""

    def starts(self, names: Sequence[str], attempt: int, first_row: int = 0) -> list[ProcessStart]:
        """Return the settings of processes that join one job, with a new port of process 0.

        Their logs have `names`, and from the second attempt on its number.
        """
        again = "" if attempt == 1 else f"-attempt-{attempt}"
        coordinator = f"127.0.0.1:{free_port()}"
        starts = []
        for number, name in enumerate(names):
            log = self.folder / f"{name}{again}.log"
            report = self.folder / f"{name}{again}.failure.json"
            place = number, coordinator, self.job_id, self.secret
            row = first_row + number
            files = log, report.absolute()
            starts.append(ProcessStart(self.job, *place, self.env, *files, self.cores[row], row))
        return starts
