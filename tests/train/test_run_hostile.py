"""A run's folder that was harmed, or made by somebody else: the right arrays, or one clear line."""

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.resumable import bits
from support.saved_checkpoint import POSITION
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.core.job import Alone
from replicax.core.sources import as_source
from replicax.core.update import TrainState
from replicax.errors import ReplicaxError
from replicax.train import lease
from replicax.train.checkpoints import manifest as manifests
from replicax.train.checkpoints.manifest import Position
from replicax.train.records import Record
from replicax.train.storage import Saving, Storage, abstract, first_batch

EXAMPLES, MANY_EXAMPLES = 50, 1_000
CONFIG = {"fields": {"rate": 1, "layers": [1, 2]}, "parallel": {"mode": "jit"}}
SAVING = Saving(every=1)
STEPS = (2, 4)
SOURCE = as_source({"x": np.zeros(10)}, 2, Alone(), shuffle=False, seed=0)


def state_at(step: int) -> TrainState:
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    made = TrainState(jnp.int32(step), {"w": jnp.arange(4.0) + step}, (), {}, jnp.uint32(3))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where), made)


def position_at(step: int) -> Position:
    return Position(**{**vars(POSITION), "step": step, "epoch": 0, "rows": 4, "records": step})


def opened(folder: Path, said: list[str], accept: bool = False) -> Storage:
    return Storage(
        folder,
        CONFIG,
        SAVING,
        Alone(),
        accept_changes=accept,
        state=state_at(0),
        seed=0,
        say=said.append,
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, beside what is none of its business."""
    beside = tmp_path_factory.mktemp("original")
    run = opened(beside / "run", [])
    assert run.folder is not None
    for step in range(1, STEPS[-1] + 1):
        run.folder.append(Record("train", step, 0, {"loss": 1 / step}, 2, 0.1, 0.5))
        if step in STEPS:
            run.save(state_at(step), position_at(step), {"batch": 2, "seconds_unrecorded": 0.5})
    run.finish(state_at(STEPS[-1]), position_at(STEPS[-1]), {"batch": 2})
    run.close()
    (beside / "outside.json").write_text('{"mine": 1}\n')
    return beside


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for another host's start take no time."""
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 0.0)


def listing(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """All that is beside the run: names, times, contents."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name != "run":
            entry = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found.append((path.name, entry.st_mtime_ns, entry.st_mode, content))
    return found


def files_of(folder: Path) -> list[str]:
    run = folder / "run"
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


# What may be done to a file.

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**64, 1e300, 5e-324, -0.0, 1.5, float("inf")])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "\n", "\x1b[2J", "..", "/etc/passwd", "float32", "\ud800", "a" * 300])
)
values = st.recursive(
    scalars,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3)
    ),
    max_leaves=5,
)


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (self.file,)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values within a JSON value."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, each in items:
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """`value` with `new` at `path`; without it, where that is `...`."""
    if not path:
        return None if new is ... else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def harm(data: st.DataObject, beside: Path) -> None:
    """Do something to one file of the run."""
    names = files_of(beside)
    json_names = [name for name in names if name.endswith((".json", ".jsonl"))]
    kind = data.draw(st.sampled_from(["json", "json", "json", "bytes", "whole", "kind"]), "kind")
    name = data.draw(st.sampled_from(json_names if kind == "json" else names), "file")
    file = beside / "run" / name
    content = file.read_bytes()
    if kind == "json":
        file.write_bytes(harmed_json(data, name, content))
    elif kind == "bytes" and content:
        at = data.draw(st.integers(0, len(content) - 1), "at")
        new = data.draw(st.binary(max_size=8), "new")
        file.write_bytes(content[:at] + new + content[at + data.draw(st.integers(0, 8)) :])
    elif kind == "whole":
        payload = pickle.dumps(Payload(str(beside / "executed")))
        choices = [b"", b"{}", b"[]", b"null\n", b"[" * 5000, b"\xff\xfe", payload, b"\0" * 100]
        file.write_bytes(data.draw(st.sampled_from(choices) | st.binary(max_size=64), "content"))
    else:
        file.unlink()
        what = data.draw(st.sampled_from(["nothing", "folder", "link", "dangling", "fifo"]), "what")
        {
            "nothing": lambda: None,
            "folder": file.mkdir,
            "link": lambda: file.symlink_to(beside / "outside.json"),
            "dangling": lambda: file.symlink_to(beside / "new"),
            "fifo": lambda: os.mkfifo(file),
        }[what]()


def harmed_json(data: st.DataObject, name: str, content: bytes) -> bytes:
    """`content` with another value somewhere; a manifest may be signed again."""
    lines = content.splitlines() if name.endswith("l") else [content]
    if not lines:
        return content
    number = data.draw(st.integers(0, len(lines) - 1), "line")
    try:
        value = json.loads(lines[number])
    except (ValueError, RecursionError):  # it was harmed before
        return content
    path = data.draw(st.sampled_from(list(places(value))), "path")
    changed = replaced(value, path, data.draw(values | st.just(...), "value"))
    signed = "manifest" in name and isinstance(changed, dict) and data.draw(st.booleans(), "sign")
    if signed:
        changed.pop("checksum", None)
        try:
            return manifests._signed(changed)
        except (ValueError, RecursionError):
            pass
    lines[number] = json.dumps(changed).encode()
    return b"\n".join(lines) + (b"\n" if len(lines) > 1 else b"")


# What comes of it.


def check_opened(beside: Path, accept: bool) -> None:
    """Open the run and restore it."""
    said: list[str] = []
    before = listing(beside)
    try:
        run = opened(beside / "run", said, accept)
        try:
            if run.found is not None:
                batch = first_batch(SOURCE, run.found.position, run.found.extra)
                assert type(batch) is int
                assert batch >= 0
                restored = run.restore(abstract(state_at(0)))
                step = run.found.position.step
                assert step in STEPS
                assert bits(restored) == bits(state_at(step))
                assert len(run.found.records) == run.found.position.records <= STEPS[-1]
                assert all(type(record) is Record for record in run.found.records)
            run.tell()
        finally:
            run.close()
    except ReplicaxError as error:
        said.append(str(error))
    for line in said:
        assert line.isprintable(), repr(line)
        assert line.strip()
    assert listing(beside) == before


def check_harmed(data: st.DataObject, original: Path, tmp_path: Path) -> None:
    beside = tmp_path / "copy"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(original, beside)
    for _ in range(data.draw(st.integers(1, 2), "times")):
        harm(data, beside)
    check_opened(beside, data.draw(st.booleans(), "accept"))


HARMS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "print_blob": True,
    "phases": [Phase.explicit, Phase.generate],  # to shrink one would take minutes
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=EXAMPLES, **HARMS)
@given(st.data())
def test_no_harm_goes_unnoticed(original: Path, tmp_path: Path, data: st.DataObject) -> None:
    check_harmed(data, original, tmp_path)


@EXHAUSTIVE
@settings(max_examples=MANY_EXAMPLES, **HARMS)
@given(st.data())
def test_none_of_many_harms_goes_unnoticed(
    original: Path, tmp_path: Path, data: st.DataObject
) -> None:
    check_harmed(data, original, tmp_path)


def test_a_run_that_was_not_harmed_goes_on(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "copy")
    said: list[str] = []
    run = opened(tmp_path / "copy" / "run", said)
    run.close()
    assert run.found is not None
    assert run.found.position.step == STEPS[-1]
    assert len(said) == 1
    check_opened(tmp_path / "copy", accept=False)


@pytest.mark.parametrize("seconds", [1e300, 1e18, 1e308, 0.0])
def test_any_time_of_a_save_can_be_told(original: Path, tmp_path: Path, seconds: float) -> None:
    beside = tmp_path / "copy"
    shutil.copytree(original, beside)
    file = beside / f"run/checkpoints/step-{STEPS[-1]:09d}/manifest.json"
    content = json.loads(file.read_text())
    del content["checksum"]
    file.write_bytes(manifests._signed({**content, "saved_at": seconds}))
    check_opened(beside, accept=False)
