"""A loader with a state goes on at the next batch, without reading from the start."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.resumable import BATCH, BATCHES, STEPS, bits, crashing, data_parallel, fit, rows

from replicax.core.data.loader_state import LoaderState, decoded, encoded
from replicax.core.data.sources import IterableSource
from replicax.errors import ConfigError

ROWS = rows(BATCH * BATCHES)
reads: list[int] = []


def row(index: int) -> dict[str, np.ndarray]:
    reads.append(int(index))
    return {name: array[index] for name, array in ROWS.items()}


class Dataset:
    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return row(index)


def of_torchdata() -> Any:
    torch = pytest.importorskip("torch")
    loading = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
    generator = torch.Generator().manual_seed(3)
    return loading.StatefulDataLoader(Dataset(), BATCH, shuffle=True, generator=generator)


def of_grain(kind: str) -> Any:
    grain = pytest.importorskip("grain")
    at_once = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    if kind == "dataset":
        data = grain.MapDataset.range(BATCH * BATCHES).shuffle(seed=1).map(row)
        return data.to_iter_dataset(read_options=at_once)

    class Row(grain.transforms.Map):
        def map(self, index: int) -> dict[str, np.ndarray]:
            return row(index)

    order = grain.samplers.IndexSampler(BATCH * BATCHES, shuffle=True, seed=1, num_epochs=1)
    parts = [Row(), grain.transforms.Batch(BATCH)]
    places = np.arange(BATCH * BATCHES)
    return grain.DataLoader(
        data_source=places, sampler=order, operations=parts, read_options=at_once
    )


class OwnIterator(Iterator[Any]):
    """Batches of rows, in an order drawn from a generator whose state has large integers."""

    def __init__(self) -> None:
        self.random, self.done = np.random.default_rng(5), 0

    def __next__(self) -> dict[str, np.ndarray]:
        if self.done == BATCHES:
            raise StopIteration
        self.done += 1
        picked = [row(index) for index in self.random.integers(0, len(ROWS["x"]), BATCH)]
        return {name: np.stack([each[name] for each in picked]) for name in ROWS}

    def get_state(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state, "done": self.done}

    def set_state(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state, self.done = state["random"], state["done"]


KINDS: dict[str, Callable[[], Any]] = {
    "torchdata": of_torchdata,
    "Grain's dataset": lambda: of_grain("dataset"),
    "Grain's loader": lambda: of_grain("loader"),
    "an iterator": OwnIterator,
}


@pytest.mark.promise("checkpoints.loader-states")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_reads_what_is_left_and_has_the_same_bits(tmp_path: Path, kind: str) -> None:
    dp, once = data_parallel(2), kind == "an iterator"
    settings: dict[str, Any] = {"epochs": 1 if once else 3}
    whole = fit(dp, source=KINDS[kind](), **settings)
    for at, per in ((3, 1),) if once else ((BATCHES + 3, 1), (2 * BATCHES, 1), (BATCHES + 3, 2)):
        folder = tmp_path / f"{at} {per}"
        with crashing(at):
            fit(dp, folder, source=KINDS[kind](), save_every=per, steps_per_call=per, **settings)
        reads.clear()
        found = fit(dp, folder, source=KINDS[kind](), steps_per_call=per, **settings)
        assert len(reads) in ((found.steps + 1) * BATCH, found.steps * BATCH)
        assert 0 < found.steps < STEPS - at + 2 * per
        assert bits(found.state) == bits(whole.state)


KILLED = """
import os, signal, sys
from pathlib import Path
from support.resumable import BATCHES, data_parallel, fit, settle
from train.test_loader_states import of_grain
import replicax as rx

class Kill(rx.Hook):
    def before_step(self, run, batch):
        if run.place.step == BATCHES + 3:
            settle()
            os.kill(os.getpid(), signal.SIGKILL)

fit(data_parallel(2), Path(sys.argv[1]), source=of_grain("dataset"), save_every=1, hooks=[Kill()])
"""


@pytest.mark.promise("run.kill-leaves-no-trace")
def test_a_run_that_is_killed_in_an_epoch_goes_on_in_it(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_NUM_CPU_DEVICES": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "run"], env=env, check=False, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    reads.clear()
    dp = data_parallel(2)
    found = fit(dp, tmp_path / "run", source=of_grain("dataset"))
    assert len(reads) == (found.steps + 1) * BATCH
    assert found.steps in (STEPS - BATCHES - 3, STEPS - BATCHES - 2)
    assert bits(found.state) == bits(fit(dp, source=of_grain("dataset")).state)


class Forgetful(OwnIterator):
    """Has a state without what it draws from."""

    def get_state(self) -> dict[str, Any]:
        return {"done": self.done}

    def set_state(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def test_a_state_that_lacks_what_the_loader_knows_is_noticed(tmp_path: Path) -> None:
    dp = data_parallel(2)
    with crashing(3):
        fit(dp, tmp_path, source=Forgetful(), save_every=1, epochs=1)
    with pytest.raises(ConfigError, match=r"\b[12] of epoch 0\b.*accept_changes"):
        fit(dp, tmp_path, source=Forgetful(), epochs=1)


def test_a_loader_without_a_state_and_one_that_refuses_it_are_told(tmp_path: Path) -> None:
    dp = data_parallel(2)
    with crashing(3):
        fit(dp, tmp_path, source=of_grain("dataset"), save_every=1)
    with pytest.raises(ConfigError, match=r"\blist\b"):
        fit(dp, tmp_path, source=list(OwnIterator()))
    with pytest.raises(ConfigError, match=r"OwnIterator .*KeyError: 'random'"):
        fit(dp, tmp_path, source=OwnIterator(), epochs=1, accept_changes=True)


def test_the_last_batch_is_read_again() -> None:
    source = IterableSource(OwnIterator(), BATCH, any_size=False)
    parts = list(source.epoch(0))
    before = parts[2].state
    assert isinstance(before, LoaderState)
    assert before.rows == 2 * BATCH
    again = IterableSource(OwnIterator(), BATCH, any_size=False)
    again.restore(LoaderState(before.epoch, before.rows, before.state, again=1))
    assert again.starts(3) == 2
    resumed = list(again.epoch(0, first=2))
    assert len(resumed) == 3
    assert np.array_equal(resumed[0].data["x"], parts[2].data["x"])
    assert np.array_equal(resumed[0].places, parts[2].places)


VALUES = {
    "plain": {"a": [1, None, True, "é", 1.5], "b": {}},
    "odd": {
        "t": (1, (2,)),
        "i": 2**100,
        "f": float("inf"),
        "$x": b"\0\xff",
        "k": {1: "a", (2,): "b"},
    },
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_of_a_state_are_json_and_come_back(value: Any) -> None:
    told = json.loads(json.dumps(encoded(value), allow_nan=False))
    assert decoded(told) == value


def test_arrays_and_tensors_of_a_state_come_back() -> None:
    torch = pytest.importorskip("torch")
    for array in (np.arange(6, dtype=np.int8).reshape(2, 3), np.float32(2.5), np.zeros((0, 2))):
        found = decoded(json.loads(json.dumps(encoded(array))))
        assert (found.dtype, found.shape, found.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        )
        tensor = decoded(encoded(torch.as_tensor(array)))
        assert torch.equal(tensor, torch.as_tensor(array))


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()])])
def test_other_values_of_a_state_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"'a'\]\[1\] .*{type(value).__name__}"):
        encoded({"a": [1, value]})
