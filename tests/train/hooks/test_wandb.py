"""`WandB`: the contents of an offline run for Weights & Biases."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE
from support.waiting import until
from support.watched_run import WatchedRun

import replicax as rx

WHY = "no wandb, which is in the lock"

BLOCK, HEADER = 32768, 7


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run's file, a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole block, or its last part
            yield Record.FromString(whole)
            whole = b""


def logged(folder: Path) -> tuple[set[str], dict[str, Any], list[dict[str, Any]]]:
    """Return ids, configuration and rows of all starts in `folder`."""
    ids, config, rows = set(), {}, []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {
                    each.key: json.loads(each.value_json) for each in record.run.config.update
                }
            if record.HasField("history"):
                items = record.history.item
                names = [item.key or item.nested_key[0] for item in items]
                rows.append(
                    {
                        name: json.loads(item.value_json)
                        for name, item in zip(names, items, strict=True)
                        if not name.startswith("_")
                    }
                )
    return ids, config, rows


@EXHAUSTIVE
def test_a_run_that_goes_on_is_the_same_run_there(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=WHY)
    state = None
    for step in (10, 20):
        hook = rx.WandB("digits")
        if state is not None:
            hook.load_state(state)
        run = WatchedRun(hook, tmp_path)
        hook.start(run)
        state = json.loads(json.dumps(hook.save_state()))
        run.trained(step, loss=float(step))
        hook.end(run)
        assert run.lines == []
        # wandb names a start by its second: two of one run within it would be one folder.
        next_second = int(time.time()) + 1
        until(lambda then=next_second: time.time() >= then)
    ids, config, rows = logged(tmp_path)
    assert ids == {state}
    assert config["recipe"] == {"width": 3}
    assert [(row["step"], row["train/loss"]) for row in rows] == [(10, 10.0), (20, 20.0)]


def test_each_run_has_an_id_of_its_own() -> None:
    hook = rx.WandB("digits")
    ids = []
    for _ in range(2):
        run = WatchedRun(hook, is_main=False)
        hook.start(run)
        ids.append(hook.save_state())
        hook.end(run)
    assert len(set(ids)) == 2
    given = rx.WandB("digits", id="mine")
    given.start(WatchedRun(given, is_main=False))
    assert given.save_state() == "mine"
