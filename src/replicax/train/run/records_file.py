"""The hook that writes the records of a run."""

from replicax.train.files.records import Record, RunFolder
from replicax.train.hooks.hook import Hook, Running


class RecordsFile(Hook):
    """Write each record to `records.jsonl`, immediately visible to readers."""

    folder: RunFolder | None = None
    """The run's folder, if any; in process 0."""

    def record(self, run: Running, record: Record) -> None:
        if self.folder is not None:
            self.folder.append(record)

    def rewound(self, run: Running) -> None:
        if self.folder is not None:
            self.folder.keep(len(run.records))
