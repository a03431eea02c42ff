"""`TensorBoard`: its event files, read by TensorBoard itself."""

from pathlib import Path
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import ConfigError

WHY = "no TensorBoard, which is in the lock"
READER = "tensorboard.backend.event_processing.event_accumulator"


class Read:
    """TensorBoard's view of a folder."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __call__(self, folder: Path) -> Any:
        found = self._reader.EventAccumulator(str(folder))
        found.Reload()
        return found

    def series(self, folder: Path, name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in self(folder).Scalars(name)]


@pytest.fixture
def read() -> Read:
    return Read(pytest.importorskip(READER, reason=WHY))


@EXHAUSTIVE
def test_metrics_are_scalars_by_step_and_the_configuration_is_there(
    read: Read, tmp_path: Path
) -> None:
    run = WatchedRun(hook := rx.TensorBoard(), tmp_path)
    hook.start(run)
    run.trained(10, loss=2.0)
    run.trained(20, loss=1.0)
    run.evaluated(20, accuracy=0.5)
    hook.end(run)
    folder = tmp_path / "tensorboard"
    assert read.series(folder, "train/loss") == [(10, 2.0), (20, 1.0)]
    assert read.series(folder, "eval/accuracy") == [(20, 0.5)]
    assert read.series(folder, "train/rows_per_second") == [(10, 20.0), (20, 20.0)]
    text = read(folder).Tensors("config")[0].tensor_proto.string_val[0]
    assert b'"width": 3' in text
    assert run.lines == []


@EXHAUSTIVE
def test_what_was_after_the_checkpoint_is_gone_once_the_run_goes_on(
    read: Read, tmp_path: Path
) -> None:
    run = WatchedRun(hook := rx.TensorBoard(tmp_path))
    hook.start(run)
    for step in (10, 20, 30):
        run.trained(step, loss=float(step))
    hook.end(run)
    run.go_back(20, 2)
    again = WatchedRun(rx.TensorBoard(tmp_path))
    again.place = run.place
    again.hook.start(again)
    again.trained(30, loss=0.5)
    again.hook.end(again)
    assert read.series(tmp_path, "train/loss") == [(10, 10.0), (20, 20.0), (30, 0.5)]


@EXHAUSTIVE
def test_what_was_after_the_step_it_went_back_to_is_gone(read: Read, tmp_path: Path) -> None:
    run = WatchedRun(hook := rx.TensorBoard(tmp_path))
    hook.start(run)
    for step in (10, 20, 30):
        run.trained(step, loss=float(step))
    run.go_back(10, 1)
    run.trained(20, loss=0.5)
    hook.end(run)
    assert read.series(tmp_path, "train/loss") == [(10, 10.0), (20, 0.5)]


def test_a_run_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        rx.TensorBoard().start(WatchedRun(rx.TensorBoard()))
