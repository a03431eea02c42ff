"""A loader that is read again from its start: different rows are noticed."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.figures import figures
from support.processes import SUPPORT, run_job
from support.resumable import BATCH, EPOCHS, bits, crashing, fit, rows
from support.tiers import only

import replicax as rx
from replicax.core.data.sources import ArraySource
from replicax.core.ground.job import Alone
from replicax.errors import ConfigError
from replicax.train.folder.read_again import FirstBatch, RereadCheck, checksums, difference
from replicax.train.hooks.audit import Snapshot

MIDDLE, END = 7, 5  # of the second epoch, and of the first


class Loader:
    """Batches of rows in a new order for each pass.

    `kept` draws the order from one generator for all passes, `epoch` from the number of each epoch.
    """

    def __init__(self, order: str, *, seed: int = 0, data: int = 1) -> None:
        self.order, self.random, self.data = order, np.random.default_rng(seed), rows(seed=data)
        self.passes = self.epoch = 0
        if order == "epoch":
            self.sampler = SimpleNamespace(set_epoch=partial(setattr, self, "epoch"))
        if order == "kept":
            self.sampler = SimpleNamespace(generator=None)  # as PyTorch's that shuffles

    def __len__(self) -> int:
        return -(-len(self.data["x"]) // BATCH)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        count = len(self.data["x"])
        if self.order == "epoch":
            self.random = np.random.default_rng(self.epoch)
        order = np.arange(count) if self.order == "fixed" else self.random.permutation(count)
        self.passes += 1
        for start in range(0, count, BATCH):
            taken = order[start : start + BATCH]
            yield {name: array[taken] for name, array in self.data.items()}


def again(
    dp: rx.DataParallel, folder: Path, at: int, *loaders: Loader, **settings: Any
) -> rx.types.Fit:
    """Return the result of the second start; each start has a new loader."""
    before, after = loaders
    with crashing(at):
        fit(dp, folder, source=before, save_every=1, batch_size=None, **settings)
    return fit(dp, folder, source=after, save_every=1, batch_size=None, progress=True, **settings)


@pytest.mark.promise("outside.other-rows")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Loader("kept"), Loader("kept")),  # the second pass of a generator, read as the first
        (Loader("kept"), Loader("kept", seed=9)),
        (Loader("fixed"), Loader("fixed", data=5)),
        (Loader("fixed"), Loader("kept")),
    ],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused(
    dp: rx.DataParallel,
    tmp_path: Path,
    before: Loader,
    after: Loader,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=r"\b1 of epoch 1\b.*accept_changes") as caught:
        again(dp, tmp_path, MIDDLE, before, after)
    (out, said), drawn = capsys.readouterr(), [each.order == "kept" for each in (before, after)]
    assert f"epoch  {END} batches" in out  # as `len()` of the loader tells
    assert said.count("generator=torch.Generator()") == sum(drawn)
    assert ("StatefulDataLoader" in str(caught.value)) == drawn[1]


def test_a_source_that_ends_before_what_was_trained_on_is_refused(
    dp: rx.DataParallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = Loader("fixed")
    shorter.data = {name: array[:BATCH] for name, array in shorter.data.items()}
    with pytest.raises(ConfigError, match=r"\b1 batches .*\b2 .*accept_changes"):
        again(dp, tmp_path, MIDDLE, Loader("fixed"), shorter)
    found = fit(dp, tmp_path, source=shorter, batch_size=None, accept_changes=True, progress=True)
    assert found.step == MIDDLE + (EPOCHS - 2)  # as the second epoch is taken to be over
    assert "(accepted)" in capsys.readouterr().out


def test_another_order_that_is_accepted_is_told(
    dp: rx.DataParallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaders = Loader("fixed"), Loader("fixed", data=5)
    again(dp, tmp_path, MIDDLE, *loaders, accept_changes=True)
    found = re.findall(
        r"^change .*\b[0-9a-f]{8} -> [0-9a-f]{8}\b.*$", capsys.readouterr().out, re.M
    )
    assert len(found) == 2  # of the skipped batch, and of the next epoch's first
    assert "(accepted)" in found[0]


@pytest.mark.parametrize("order", ["fixed", "epoch"])
@pytest.mark.parametrize("at", [MIDDLE, END, 2 * END])
def test_the_same_order_goes_on_to_the_same_bits(
    dp: rx.DataParallel, tmp_path: Path, at: int, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = again(dp, tmp_path, at, Loader(order), Loader(order))
    loader = Loader(order)
    whole = fit(dp, source=loader, batch_size=None)
    assert loader.epoch == (EPOCHS - 1 if order == "epoch" else 0)  # as the run told its sampler
    assert bits(found.state) == bits(whole.state)
    assert "\nchange" not in capsys.readouterr().out


class Back(rx.Hook):
    """Goes back two steps from `step`, once."""

    good: Any = None
    done = False

    def __init__(self, step: int = 4) -> None:
        self.at = step

    def dispatched(self, run: Any, step: Any) -> None:
        run.wait()

    def settle(self, run: Any, due: bool) -> None:
        if run.place.step == self.at - 2 and self.good is None:
            self.good = Snapshot(run.state), run.place
            run.note_good()
        if run.place.step == self.at and not self.done:
            self.done = True
            run.go_back(self.good[0].restore(), self.good[1], "a trial", {})


@pytest.mark.parametrize("order", ["fixed", "kept"])
def test_a_run_that_goes_back_says_that_rows_have_changed(
    dp: rx.DataParallel, order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = {"hooks": [Back()], "epochs": 1, "batch_size": None, "progress": True}
    result = fit(dp, source=Loader(order), **hooks)
    assert [each.kind for each in result.records].count("restore") == 1
    said = re.findall(r"\b1 of epoch 0\b.*[0-9a-f]{8} -> ", "".join(capsys.readouterr()))
    assert len(said) == (order == "kept")


def test_the_next_epoch_is_read_ahead_and_dropped_if_the_run_goes_back(
    dp: rx.DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, closed = list[int](), list[list[int]]()
    order = ArraySource.order
    monkeypatch.setattr(
        ArraySource, "order", lambda self, epoch: read.append(epoch) or order(self, epoch)
    )

    class Closes(rx.Hook):
        def epoch(self, run: Any, record: Any) -> None:
            closed.append(sorted({*read}))

    class Late(Back):
        """Goes back when the epoch is closed."""

        def settle(self, run: Any, due: bool) -> None:
            if run.place.step != END or read[-1] == 1:
                super().settle(run, due)

    found = fit(dp, hooks=[Closes()])
    assert closed == [[*range(epoch + 2)] for epoch in range(EPOCHS - 1)] + [[*range(EPOCHS)]]
    read.clear()
    back = fit(dp, hooks=[Late(END)])
    assert read[-5:] == [0, 1, 0, 1, 2]
    assert bits(back.state) == bits(found.state)


@pytest.mark.promise("outside.other-rows")
@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("loads", [False, True])
def test_other_evaluation_data_is_told_once_and_not_refused(
    dp: rx.DataParallel, tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: bool, loads: bool
) -> None:
    def evaluation(seed: int) -> rx.Evaluation:
        source = Loader("fixed", data=seed) if loads else rows(20, seed)
        return rx.Evaluation(sets={"dev": source}) if sets else rx.Evaluation(source)

    with crashing(2 * END + 1):
        fit(dp, tmp_path, eval_source=evaluation(2), save_every=1)
    for seed, steps, lines in ((2, 12, 0), (3, 14, 1), (3, 16, 0)):
        fit(dp, tmp_path, eval_source=evaluation(seed), steps=steps, progress=True)
        out = capsys.readouterr().out
        found = [line for line in out.splitlines() if re.match(r"change .*\bevaluation\b", line)]
        assert len(found) == lines, out
    fit(dp, tmp_path, progress=True)
    assert "\nchange" not in capsys.readouterr().out


def test_the_process_whose_rows_differ_is_named() -> None:
    assert difference(["a", None, "c"], ["a", "b", "d"]) == "c -> d in process 2"
    for before in (None, [None], []):  # from before there were checksums
        assert difference(before, ["a"]) is None


def test_only_an_order_that_was_fixed_can_change() -> None:
    def begins(first: FirstBatch, *values: int) -> list[bool]:
        given = [{"x": np.full(3, value)} for value in values]
        return [first.begins(each, Alone()) is not None for each in given]

    def resumed(first: FirstBatch) -> FirstBatch:
        made = FirstBatch()
        made.load_state(first.save_state())
        return made

    fixed, once, shuffled = FirstBatch(), FirstBatch(), FirstBatch()
    assert begins(fixed, 1, 1) == [False, False]
    assert begins(resumed(fixed), 1, 2) == [False, False]
    assert begins(resumed(fixed), 2, 2, 3) == [True, False, False]
    assert begins(once, 1) == [False]
    assert begins(resumed(once), 2) == [False]
    assert begins(shuffled, 1, 2, 1) == [False] * 3
    assert begins(resumed(shuffled), 2, 3) == [False, False]


@pytest.mark.parametrize(("order", "says"), [("kept", True), ("epoch", False)])
def test_a_start_says_that_its_order_is_perhaps_another(
    dp: rx.DataParallel, tmp_path: Path, order: str, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(dp, tmp_path, source=Loader(order), epochs=2)
    assert "order" not in capsys.readouterr().out
    fit(dp, tmp_path, source=Loader(order, seed=1), epochs=4, progress=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("order ")]
    assert [figures(line) for line in lines] == [["3"]] * says


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_processes_that_all_read_the_same_rows_are_alarmed_once(own: bool, same: bool) -> None:
    alarms: list[str] = []
    job: Any = SimpleNamespace(gather=lambda what, mine: [mine, mine if same else "another"])
    check = RereadCheck(job, print, alarms.append, accept=False)
    source = SimpleNamespace(of_each_process=own, order_is_known=True)
    for epoch in range(2):
        feed: Any = SimpleNamespace(first=0, epoch=epoch, source=source)
        batch: Any = SimpleNamespace(host={"x": np.ones(3)})
        check.check(feed, batch, begun=False)
    assert [figures(alarm) for alarm in alarms] == [["2"]] * (own and same)


def test_a_checksum_is_of_values_types_and_names() -> None:
    batches: list[Any] = [
        {"x": np.zeros(4, np.float32)},
        {"x": np.zeros(4, np.int32)},
        {"x": np.zeros((2, 2), np.float32)},
        {"y": np.zeros(4, np.float32)},
        {"x": np.float32([0, 0, 0, 1])},
    ]
    found = [checksums(each, Alone())[0] for each in batches]
    assert len(set(found)) == len(batches)
    assert checksums({"x": np.zeros(8, np.float32)[::2]}, Alone())[0] == found[0]


def test_other_rows_of_a_process_are_refused(dp: rx.DataParallel, tmp_path: Path) -> None:
    with crashing(MIDDLE):
        fit(dp, tmp_path, source=rx.ProcessLocal(rows()))
    with pytest.raises(ConfigError, match=r"data\.parts"):
        fit(dp, tmp_path, source=rx.ProcessLocal(rows(seed=5)))
    assert fit(dp, tmp_path, source=rx.ProcessLocal(rows())).steps


@pytest.mark.parametrize("seed", only([2], [1, 2]))
def test_each_process_compares_its_own_rows(tmp_path: Path, seed: int) -> None:
    script = SUPPORT / "job_loader.py"
    for ended in run_job(script, tmp_path, 2, 1):
        assert ended.code == 75, ended.err
    for ended in run_job(script, tmp_path, 0, seed):
        assert (ended.code == 0) == (seed == 1), ended.err
        assert ("process 1" in ended.err) == (seed == 2)
