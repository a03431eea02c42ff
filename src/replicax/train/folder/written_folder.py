"""The folder of a run: written by one start at a time, which resumes from its contents."""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError, ConfigError, ReplicaxError, RunInUseError
from replicax.text.wording import first_line
from replicax.train.checkpoints.arrays import read
from replicax.train.checkpoints.manifest import Manifest, Position
from replicax.train.checkpoints.saver import Saver
from replicax.train.files.lease import Lease, take_lease
from replicax.train.files.places import exists, shown, writing
from replicax.train.files.records import (
    CONFIG,
    DAMAGED,
    HISTORY,
    Record,
    RunFolder,
    read_records,
)
from replicax.train.folder.changes import (
    another_run,
    check_changes,
    config_changes,
    read_config,
    run_id,
)
from replicax.train.folder.goodput import FILE, Ledger
from replicax.train.folder.storage import (
    WRITER,
    FolderOptions,
    IslandCheckpoints,
    ResumePoint,
    Storage,
    what_is_saved,
)


class WrittenFolder(Storage):
    """The folder of a run, which may contain an earlier start of the run.

    All processes have one; only process 0 holds the lease, and writes everything but arrays.
    It is open after `begin`, or after `take_over`, of a folder that was `followed`.
    """

    def __init__(self, options: FolderOptions, followed: Storage | None = None) -> None:
        super().__init__()
        self.path: Path = options.path
        self._options, self._config, self._job = options, options.config, options.job
        self._saving, self._say, self._alarm = options.saving, options.say, options.alarm
        self._before = self._config
        self.knows_program = "program" in self._config
        self._lease: Lease | None = None
        self._store = options.store()
        if followed is not None:
            self.own, self.ledger = followed.own, followed.ledger
        elif options.has_own:
            self.own = IslandCheckpoints(options, self._store)
        about = options.job, options.seed, self._config, options.never_finite, options.pinned
        self._saver = Saver(self._store, 0, self._check, *about)
        self._saved: Any = None
        self._changed = False
        self._taken_over: int | None = None  # the last step that the island before has saved

    def begin(self) -> None:
        """Acquire the lease, and find the checkpoint to resume from; all processes must call it."""
        try:
            opened = self._job.broadcast("the resume point", writing(self.path)(self._open))
            self._saver.token, self.traced = opened["token"], opened["traced"]
            if opened["checkpoint"] is not None:
                position = Position(**opened["position"])
                records = read_records(self.path, position.records).records
                where = self._store.folder / opened["checkpoint"]
                self.found = ResumePoint(where, position, opened["extra"], records)
                self._changed = opened["changed"]
        except BaseException:
            self.close()  # nobody else would release the lease
            raise
        # Another island may take over the folder while this one is frozen.
        if self.folder is not None and self._options.island is not None:
            self.folder.write_while(self.still_writes)

    def _open(self) -> dict[str, Any]:
        """Acquire the lease, and find the checkpoint to resume from; in process 0."""
        self.folder = RunFolder(self.path)
        if not self._saving.wanted:
            self.folder.refuse_another("a run without checkpoints cannot resume")
            self._config.setdefault("start", {})["run"] = secrets.token_hex(8)
            self.folder.write_config(self._config)
            return {"token": 1, "checkpoint": None, "traced": ""}
        # First, as only who holds it may change what is there.
        self._lease = take_lease(self.path)
        known, said = exists(self.path / CONFIG), list[str]()
        if known:
            self._before = read_config(self.path / CONFIG)
            said += self._compare(self._before, ())
        unfinished = self._store.clean()
        self.ledger = Ledger(self.path / FILE, self._lease.token)
        if self.ledger.damaged:
            self._say(f"times  {self.ledger.damaged:,} damaged lines of {FILE} do not count")
        there = [step for step, _ in self._store.paths()]
        # Who begins to save has saved what came before.
        begun = self.ledger.saved if self._store.shows_begun else self.ledger.saved[:-1]
        lost = begun[-1] if begun else 0
        if lost in unfinished or (there and lost <= there[-1]):
            lost = 0
        with self.ledger.spending("restoring"):
            newest = self._store.newest_good(self._options.arrays, self._alarm)
        self.ledger.restored(None if newest is None else newest[1].position.step)
        if newest is None and not known:
            self.folder.refuse_another(f"it has no {CONFIG} and no good checkpoint")
        if newest is not None:
            self._check_belongs(*newest, known, said)
        self._config.setdefault("start", {})["run"] = run_id(self._before) or secrets.token_hex(8)
        if "program" in self._before:  # until the first batch gives the new one
            self._config.setdefault("program", self._before["program"])
        traced = self._before.get("program", {}).get("batch", "")
        if newest is None:
            if there or lost:
                why = f"none of {len(there)} checkpoints can be trusted"
                if not there:
                    why = f"the checkpoint of step {lost:,} is not there"
                self._alarm(f"begin at step 0: {why}; {DAMAGED} is a copy of its records")
            self.folder.keep(0, copied=bool(there or lost))
            self.folder.write_config(self._config)
            return {"token": self._lease.token, "checkpoint": None, "traced": traced}
        path, manifest = newest
        position = manifest.position
        history = self.folder.keep(position.records, manifest.extra.get(HISTORY))
        for fault in history.faults:
            copy = f"; {DAMAGED} is a copy of the file" if history.damaged else ""
            self._alarm(f"{self.folder.records}: {fault}, and training goes on without{copy}")
        position = dataclasses.replace(position, records=len(history.records))
        saved = time.strftime("%d %b %H:%M:%S", time.localtime(manifest.saved_at))
        again = history.reached - position.step
        more = f"; steps to repeat: {again:,}" if again > 0 else ""
        more += f"; the checkpoint of step {lost:,} is not there" if lost else ""
        self._say(f"resume {shown(self.path)}: step {position.step:,}, saved {saved}{more}")
        return {
            "token": self._lease.token,
            "traced": traced,
            "checkpoint": path.name,
            "position": dataclasses.asdict(position),
            "extra": manifest.extra,
            "changed": any(each.matters for each in config_changes(manifest.config, self._config)),
        }

    def take_over(self, lease: Callable[[], Lease | None], records: Sequence[Record]) -> None:
        """Go on as the island that is gone, with the `records` of this one; all must call it.

        `lease` takes the lease, in process 0.
        """

        def taken() -> tuple[int, int | None]:
            try:
                self._lease = lease()
                return self._taken(records)
            except OSError as error:  # all processes of an island have to know
                raise CheckpointError(f"{self.path}: {error.strerror or error}") from error

        self._saver.token, self._taken_over = self._job.broadcast("the take-over", taken)

    def _taken(self, records: Sequence[Record]) -> tuple[int, int | None]:
        """Return the token of the lease, and the last step saved before."""
        token = 1 if self._lease is None else self._lease.token
        self.folder = RunFolder(self.path)
        if exists(self.path / CONFIG):
            self._before = read_config(self.path / CONFIG)
        self._config.setdefault("start", {})["run"] = run_id(self._before) or secrets.token_hex(8)
        for part in ("program", "bits"):
            if part in self._before:
                self._config.setdefault(part, self._before[part])
        if not exists(self.path / CONFIG):  # the folder was removed meanwhile
            self._write_config()
        self.folder.take_over(records, self.still_writes)
        self._store.clean()
        self.ledger = Ledger(self.path / FILE, token)
        self.ledger.enter("productive")
        return token, max((step for step, _ in self._store.paths()), default=None)

    def _check_belongs(
        self, path: Path, manifest: Manifest, known: bool, said: Collection[str]
    ) -> None:
        """Raise `ConfigError` if a checkpoint is not this run's, in process 0."""
        if not known:
            self._before = manifest.config
            self._say(f"config {self.path / CONFIG} is missing: restored from {path.name}")
        if another := another_run(self._before, manifest.config):
            if not self._options.accept_changes:
                raise ConfigError(
                    f"{path} {another}: move it back to that run's folder, or continue from it "
                    "(--accept-changes, or accept_changes=True)"
                )
            self._say(f"change {path.name} {another} (accepted)")
        self._compare(manifest.config, said)

    def _compare(self, before: dict[str, Any], said: Collection[str]) -> list[str]:
        """Report how the run has changed since `before`, except for lines that were `said`."""
        lines = check_changes(before, self._config, accept=self._options.accept_changes)
        for line in [each for each in lines if each not in said]:
            self._say(line)
        return lines

    def check_program(self, program: dict[str, str]) -> None:
        self._config["program"], self.knows_program = program, True

        def compare() -> None:
            before, now = (
                {part: each for part, each in of.items() if part in ("versions", "program")}
                for of in (self._before, self._config)
            )
            for line in check_changes(before, now, accept=self._options.accept_changes):
                if line.startswith("change program."):  # versions were compared in `_open`
                    self._say(line)

        self._job.broadcast("the program", compare)
        self._write_config()

    def check_bits(self, programs: dict[str, str]) -> None:
        before = self._before.get("bits", programs)
        others = [n for n in {**before, **programs} if before.get(n) != programs.get(n)]
        if others:
            self._alarm(
                f"bits will differ from here on: {len(others)} of {len(programs)} compiled "
                f"programs changed ({', '.join(others)}): another jax, processor or batch size"
            )
        self._config["bits"] = programs
        self._write_config()

    def restore(self, like: TrainState) -> TrainState:
        assert self.found is not None
        with self.ledger.spending("restoring"):
            state = read(like, self._store.local(self.found.path))
        if not self._changed:  # else it is saved again, with what was accepted
            self._saved = what_is_saved(self.found.position, self.found.extra)
        self._saver.saved_step = self.found.position.step
        self._write_config()  # not earlier: a refused start must not change it
        return state

    def _write_config(self) -> None:
        if self.folder is not None:
            self.folder.write_config(self._config)

    def save(self, state: TrainState, position: Position, extra: dict[str, Any]) -> None:
        what = what_is_saved(position, extra)
        if what == self._saved:
            return
        if self.own is not None and position.step == self._taken_over:
            self.own.save(state, position)
        else:
            with self.ledger.spending("saving"):
                self._sync()
                history = {} if self.folder is None else {HISTORY: self.folder.digest}
                island = {} if self._options.island is None else {WRITER: self._options.island}
                self._saver.save(state, position, extra | history | island)
                self.ledger.mark(position.step)  # only now: a save that did not begin saves no work
        self._saved = what

    def finish(self, state: TrainState, position: Position, extra: dict[str, Any]) -> None:
        with self.ledger.spending("saving"):
            self.save(state, position, extra)
            if self.own is not None:
                self.own.wait()
            while not self._saver.wait():
                self.tell()
                self._saved = None
                self.save(state, position, extra)
            self.tell()
            if self._lease is not None:
                with contextlib.suppress(OSError):  # Orbax may write on after a save has failed
                    self._store.clean()

    def tell(self) -> None:
        for line in [*self._saver.poll(), *(self.own.poll() if self.own else ())]:
            self._saved = None  # the save failed, so that another of the same state is due
            self._alarm(line)
        for fault in (self.folder and self.folder.fault, self.ledger.fault):
            if fault:
                self._alarm(f"{fault}; its new lines are kept, and written as soon as possible")

    def close(self) -> None:
        with contextlib.suppress(RunInUseError):  # who took over has records of its own
            self._sync()
        if self.folder is not None and (fault := self.folder.unwritten):
            self._alarm(f"{fault}; its last lines are lost")
        self.ledger.close()
        if self._lease is not None:
            self._lease.release()

    def _sync(self) -> None:
        """Write the records to storage if this start still holds the lease."""
        if self.folder is None:
            return
        try:
            self._check()
        except CheckpointError as error:  # the next save tries again
            self._alarm(f"{self.folder.records} lacks the newest records: {first_line(error)}")
        else:
            self.folder.sync()

    def goes_on(self, step: int, *, terminated: bool) -> bool:
        if not self._saving.wanted:  # there is no lease
            return terminated
        with contextlib.suppress(ReplicaxError, OSError):
            self._check()
            return True
        return False

    def still_writes(self) -> bool:
        """Whether no newer start has taken over the folder, in process 0."""
        with contextlib.suppress(CheckpointError):
            try:
                self._check()
            except RunInUseError:
                return False
        return True

    def all_still_write(self) -> bool:
        return bool(self._job.broadcast("whether this start still writes", self.still_writes))

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.check()
