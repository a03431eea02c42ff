"""Curves: a real picture of whatever was recorded, drawn while a run goes and at its end."""

import math
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clock import Clock

from replicax.errors import MissingDependencyError
from replicax.train import curves as module
from replicax.train.curves import Curves, draw_curves, panels_of, rates_of
from replicax.train.records import Record


def png(path: Path) -> tuple[int, int, bytes]:
    """Width, height and pixels of a PNG whose every chunk has its checksum."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, pixels, kinds = 8, b"", []
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, data = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", content[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(kind + data)
        kinds.append(kind)
        pixels += data if kind == b"IDAT" else b""
        at += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    width, height = struct.unpack(">II", content[16:24])
    return width, height, zlib.decompress(pixels)


def train(step: int, **metrics: float) -> Record:
    return Record("train", step, 0, metrics, 64, 0.0 if step == 1 else 0.1, 0.0)


def score(step: int, **metrics: float) -> Record:
    return Record("eval", step, 0, metrics, 64, 0.1)


def timed(*rows_and_seconds: tuple[int, float]) -> list[Record]:
    """Train records of steps 1, 2, and so on."""
    each = enumerate(rows_and_seconds, 1)
    return [
        Record("train", step, 0, {"loss": 1.0}, rows, seconds) for step, (rows, seconds) in each
    ]


def coloured(pixels: bytes) -> int:
    """Bytes that are not of the background."""
    return int(np.count_nonzero(np.frombuffer(pixels, np.uint8) != 255))


@pytest.mark.parametrize(
    "records",
    [
        [train(step, loss=1 / step, accuracy=step / 9) for step in range(1, 9)]
        + [score(8, loss=0.2, accuracy=0.9)],
        [train(1, loss=1.0)],
        [train(1, loss=1.0), train(2, loss=math.nan)],
        [score(1, loss=1.0)],
        [train(1, loss=1.0), score(1, loss=1.0, top5=0.5)],
        [],
    ],
    ids=["usual", "one step", "nan", "eval only", "metric in eval only", "none"],
)
def test_any_history_is_drawn(records: list[Record], tmp_path: Path) -> None:
    draw_curves(records, tmp_path / "curves.png")
    width, height, pixels = png(tmp_path / "curves.png")
    names = {name for record in records for name in record.metrics}
    assert (width, height) == ((len(names) + 1) * 630, 495)
    assert coloured(pixels) > 1000


def test_a_single_record_can_be_seen(tmp_path: Path) -> None:
    import matplotlib.image

    draw_curves([train(1, loss=1.0)], tmp_path / "one.png")
    image = matplotlib.image.imread(tmp_path / "one.png")[..., :3]
    panel = image[150:400, 100:420]  # inside the loss panel's axes, clear of its legend
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert np.any(np.all(np.abs(panel - blue) < 0.1, axis=-1))


def test_many_metrics_still_make_a_picture_of_a_sane_size(tmp_path: Path) -> None:
    metrics = {f"metric {number}": 1.0 for number in range(16)}
    draw_curves([train(1, loss=1.0, **metrics)], tmp_path / "many.png")
    width, height, _ = png(tmp_path / "many.png")
    assert max(width, height) < 10_000


def test_a_file_of_five_panels_has_two_rows_of_three(tmp_path: Path) -> None:
    draw_curves([train(1, loss=1.0, a=1.0, b=1.0, c=1.0)], tmp_path / "five.png")
    width, height, _ = png(tmp_path / "five.png")
    assert (width, height) == (3 * 630, 2 * 495)


def test_a_panel_has_each_series_of_its_metric() -> None:
    records = [
        Record("train", 1, 0, {"accuracy": 0.1, "loss": 9.0, "head/loss": 4.0}, 64, 0.0),
        Record("train", 2, 0, {"loss": 8.0}, 64, 1.0, figures={"learning_rate": 0.5}),
        score(2, **{"dev/loss": 7.0, "test/loss": 6.0, "head/loss": 5.0}),
        Record("skip", 3, 0, {"loss": math.nan}, 64, 0.0),
        score(4, loss=3.0),
    ]
    panels = panels_of(records)
    assert panels == {
        "loss": {
            "train": [(1, 9.0), (2, 8.0)],
            "dev": [(2, 7.0)],
            "test": [(2, 6.0)],
            "eval": [(4, 3.0)],
        },
        "accuracy": {"train": [(1, 0.1)]},
        "head/loss": {"train": [(1, 4.0)], "eval": [(2, 5.0)]},  # a metric with that name
        "learning_rate": {"train": [(2, 0.5)]},
    }
    assert next(iter(panels)) == "loss"


def test_rates_are_of_neighbours_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATES", 2)
    records = timed((10, 0.0), (10, 1.0), (2, 0.5), (20, 1.5), (930, 93.0), (30, 3.5))
    assert rates_of([*records, score(8, loss=1.0)]) == [(4, 32 / 3), (6, 960 / 96.5)]


def test_records_of_one_length_have_rates_of_their_own() -> None:
    assert rates_of(timed((10, 1.0), (20, 1.0), (30, 1.0))) == [(1, 10.0), (2, 20.0), (3, 30.0)]
    assert rates_of(timed((10, 0.0))) == []


def test_a_long_run_is_drawn_as_means() -> None:
    given = [4.0, 8.0, 1.0, math.nan, math.nan, math.nan, 5.0]
    groups = module._groups(given, 3)
    assert [len(each) for each in groups] == [3, 3, 1]
    np.testing.assert_array_equal([module._mean(each) for each in groups], [13 / 3, math.nan, 5.0])
    assert module._groups(given, 7) == [[each] for each in given]


@pytest.mark.parametrize(
    ("step", "text"), [(0, "0"), (500, "500"), (250_000, "250k"), (1_500_000, "1.5M")]
)
def test_many_steps_are_written_short(step: int, text: str) -> None:
    assert module._short()(step) == text


def test_a_drawing_that_fails_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    path = tmp_path / "curves.png"
    draw_curves([train(1, loss=1.0)], path)
    before = path.read_bytes()

    def half(figure: Figure, file: Any, **settings: Any) -> None:
        file.write(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="No space"):
        draw_curves([train(2, loss=1.0)], path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("title", ["costs $5 and $", "a_b^c", "50 % {x}"])
def test_a_title_is_text(title: str, tmp_path: Path) -> None:
    (tmp_path / title).mkdir()
    draw_curves([train(1, loss=1.0)], tmp_path / title / "curves.png")
    png(tmp_path / title / "curves.png")


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"matplotlib.*replicax\[cli\]"):
        draw_curves([], tmp_path / "curves.png")


class Drawings:
    """Stands in for `draw_curves`: what was drawn, in which thread; holds each until it may go."""

    def __init__(self) -> None:
        self.drawn: list[tuple[int, Path, bool]] = []
        self.error: Exception | None = None
        self.begun, self.may_go = threading.Semaphore(0), threading.Event()
        self.may_go.set()

    def __call__(self, records: Sequence[Record], path: Path) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        self.begun.release()
        assert self.may_go.wait(10)
        self.drawn.append((len(records), path, beside))
        if self.error is not None:
            raise self.error


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> Drawings:
    drawings = Drawings()
    monkeypatch.setattr(module, "draw_curves", drawings)
    return drawings


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Going:
    """Stands in for a run in `folder`."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.records = folder, list[Record]()
        self.said: list[str] = []
        self.say: Callable[[str], None] = self.said.append

    def add(self, hook: Any) -> None:
        self.records.append(train(len(self.records) + 1, loss=1.0))
        hook.record(self, self.records[-1])


def test_a_run_is_drawn_every_so_often_beside_it_and_at_its_end(
    drawings: Drawings, clock: Clock, tmp_path: Path
) -> None:
    hook: Any = Curves(seconds=60)
    run = Going(tmp_path / "first")
    hook.start(run)
    for _ in range(30):  # a record every 10 s, the first after 10
        clock.now += 10
        run.add(hook)
        if len(run.records) % 6 == 0:
            assert drawings.begun.acquire(timeout=10)
            hook._drawing.result(10)
    hook.end(run)
    path = tmp_path / "first" / "curves.png"
    assert drawings.drawn == [
        *((count, path, True) for count in (6, 12, 18, 24, 30)),
        (30, path, False),
    ]


def test_a_run_does_not_wait_for_a_drawing_and_its_end_does(
    drawings: Drawings, clock: Clock, tmp_path: Path
) -> None:
    hook: Any = Curves(seconds=1)
    run = Going(tmp_path)
    hook.start(run)
    drawings.may_go.clear()
    for _ in range(5):
        clock.now += 2
        run.add(hook)
    assert drawings.begun.acquire(timeout=10)
    assert not drawings.begun.acquire(timeout=0.1)  # one at a time
    assert drawings.drawn == []
    threading.Timer(0.1, drawings.may_go.set).start()
    hook.end(run)
    assert [count for count, *_ in drawings.drawn] == [1, 5]


def test_what_a_drawing_raises_is_raised_in_the_run(
    drawings: Drawings, clock: Clock, tmp_path: Path
) -> None:
    hook: Any = Curves(seconds=1)
    run = Going(tmp_path)
    hook.start(run)
    drawings.error = OSError(28, "No space left on device")
    clock.now += 2
    run.add(hook)
    hook._drawing.exception(10)
    clock.now += 2
    with pytest.raises(OSError, match="No space"):
        run.add(hook)
    hook._thread.shutdown()


@pytest.mark.parametrize("folder", [None, Path("runs/first")])
def test_without_a_folder_or_a_record_nothing_is_drawn(
    drawings: Drawings, clock: Clock, folder: Path | None
) -> None:
    hook: Any = Curves(seconds=1)
    run = Going(folder)
    hook.start(run)
    clock.now += 2
    if folder is None:
        run.add(hook)
    hook.end(run)
    assert drawings.drawn == []


def test_without_matplotlib_the_end_says_so_once(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    hook: Any = Curves(seconds=1)
    run = Going(tmp_path)
    hook.start(run)
    for _ in range(4):
        clock.now += 2
        run.add(hook)
    hook.end(run)
    (said,) = run.said
    assert said.startswith("no curves.png: matplotlib")
    assert list(tmp_path.iterdir()) == []
