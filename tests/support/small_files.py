"""A run's folder with damage, and how a start reacts; every single-bit flip of its small files."""

import contextlib
import dataclasses
import io
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax.core.data.sources import as_source
from replicax.core.ground.job import Alone
from replicax.core.ground.train_state import TrainState
from replicax.errors import ReplicaxError
from replicax.train.checkpoints.arrays import abstract, array_entries
from replicax.train.checkpoints.manifest import Position
from replicax.train.files import lease
from replicax.train.files.fingerprint import sha256
from replicax.train.files.records import Record, plain_config
from replicax.train.files.sealed import sealed
from replicax.train.folder import load
from replicax.train.folder.goodput import Ledger
from replicax.train.folder.saving import Saving
from replicax.train.folder.storage import FolderOptions
from replicax.train.folder.written_folder import WrittenFolder
from replicax.train.run.run_state import first_batch

CONFIG = {
    "fields": {"rate": 0.1, "layers": [1, 2]},
    "parallel": {"mode": "jit"},
    "versions": {"jax": "0.10.2"},
    "start": {"command": ["train.py", "--rate", "0.1"], "host": "a-host"},
}
SOURCE = as_source({"x": np.zeros(10)}, 2, Alone(), shuffle=False, seed=0)
LONGEST_SECONDS = 5.0


def state_at(step: int) -> TrainState:
    where = jax.sharding.NamedSharding(
        rx.make_mesh(devices=jax.devices()[:1]), jax.sharding.PartitionSpec()
    )
    made = TrainState(jnp.int32(step), {"w": jnp.arange(4.0) + step}, (), {}, jnp.uint32(3))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where), made)


def make_run(folder: Path, saves: Sequence[int] = (2,)) -> None:
    """Make a run that saved at steps `saves` and was killed a step after the last."""
    run = _storage(folder, [])
    assert run.folder is not None
    for step in range(1, saves[-1] + 2):
        run.folder.append(Record("train", step, 0, {"loss": 1 / step}, 2, 0.1, 0.5))
        if step in saves:
            at = (
                state_at(step),
                Position(step, 0, 4, 0, 4, 0, step, 0),
                {"batch": 2, "batch_size": 2},
            )
            run.save(*at)
            if step == saves[-1]:
                run.finish(*at)
    best = {"metric": "loss", "value": 1 / saves[-1], "step": saves[-1]}
    (folder / load.BEST).write_bytes(sealed(best))
    run.close()


def small_files(folder: Path) -> list[Path]:
    """Return the files that a start reads, without the arrays."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(path for path in found if "/default/" not in path.as_posix())


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The messages of a start, and what it read from the run."""

    said: list[str]
    read: dict[str, Any]

    @property
    def fault(self) -> str | None:
        """Return what is wrong with the outcome, for any damage."""
        wrong = (each for each in self.said if not each.isprintable() or not each.strip())
        return next((f"not one line: {each!r}" for each in wrong), None)


def outcome(folder: Path, accept: bool = False) -> Outcome:
    """Start the run in `folder` and load it, as a user would."""
    said, read = list[str](), dict[str, Any]()
    with contextlib.redirect_stderr(io.StringIO()) as printed, _impatient():
        for part in (_load, _start):
            try:
                part(folder, said, read, accept)
            except ReplicaxError as error:
                said.append(f"{type(error).__name__}: {error}")
    return Outcome([*said, *printed.getvalue().splitlines()], read)


def unnoticed(original: Path, name: Path, bit: int, at: Path, expected: Outcome) -> str | None:
    """Flip one bit of the file `name` in a copy of the run; returns what is wrong then, or None."""
    shutil.copytree(original, at)
    content = bytearray((at / name).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (at / name).write_bytes(content)
    started = time.perf_counter()
    found = outcome(at)
    seconds = time.perf_counter() - started
    shutil.rmtree(at)
    if seconds > LONGEST_SECONDS:
        return f"{name}, bit {bit}: {seconds:.0f} s"
    if found.fault:
        return f"{name}, bit {bit}: {found.fault}"
    if found.read != expected.read and _timeless(found.said) == _timeless(expected.said):
        return f"{name}, bit {bit}: unnoticed"
    return None


def _timeless(said: list[str]) -> list[str]:
    return [re.sub(r"/\S+", "", line) for line in said]


def _load(folder: Path, said: list[str], read: dict[str, Any], accept: bool) -> None:
    read["best"] = load.find_checkpoint(folder, "best").manifest


def _start(folder: Path, said: list[str], read: dict[str, Any], accept: bool) -> None:
    run = _storage(folder, said, accept)
    try:
        read["times"] = _spent(run.ledger)
        read["config"] = run._before
        if run.found is not None:
            read["found"] = run.found.position, run.found.extra, run.found.records
            read["batch"] = first_batch(SOURCE, run.found.position, run.found.extra)
            read["state"] = sha256(run.restore(abstract(state_at(0))))
        run.tell()
        read["opened"] = True
    finally:
        run.close()


def _spent(ledger: Ledger) -> Any:
    return [(start.seconds, start.began, start.ended) for start in ledger._earlier]


def _storage(folder: Path, said: list[str], accept: bool = False) -> WrittenFolder:
    options = FolderOptions(
        path=folder,
        config=plain_config(CONFIG),
        saving=Saving(every=1),
        job=Alone(),
        arrays=array_entries(state_at(0)),
        seed=0,
        say=said.append,
        alarm=said.append,
        accept_changes=accept,
    )
    opened = WrittenFolder(options)
    opened.begin()
    return opened


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """Do not wait for starts on other hosts."""
    before, lease.EXPIRE_SECONDS = lease.EXPIRE_SECONDS, 0.0
    try:
        yield
    finally:
        lease.EXPIRE_SECONDS = before
