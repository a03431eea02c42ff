"""Curves: a real picture of whatever was recorded."""

import math
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from replicax.errors import MissingDependencyError
from replicax.train.curves import draw_curves
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
    draw_curves(records, tmp_path / "curves.png", "a run · 8 devices")
    width, height, pixels = png(tmp_path / "curves.png")
    names = {name for record in records for name in record.metrics}
    assert (width, height) == ((len(names) + 1) * 630, 495)
    assert coloured(pixels) > 1000


def test_a_single_record_can_be_seen(tmp_path: Path) -> None:
    import matplotlib.image

    draw_curves([train(1, loss=1.0)], tmp_path / "one.png", "one step")
    image = matplotlib.image.imread(tmp_path / "one.png")[..., :3]
    panel = image[150:400, 100:420]  # inside the loss panel's axes, clear of its legend
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert np.any(np.all(np.abs(panel - blue) < 0.1, axis=-1))


def test_many_metrics_still_make_a_picture_of_a_sane_size(tmp_path: Path) -> None:
    metrics = {f"metric {number}": 1.0 for number in range(16)}
    draw_curves([train(1, loss=1.0, **metrics)], tmp_path / "many.png", "many")
    width, height, _ = png(tmp_path / "many.png")
    assert max(width, height) < 10_000


@pytest.mark.parametrize("title", ["costs $5 and $", "a_b^c", "50 % {x}"])
def test_a_title_is_text(title: str, tmp_path: Path) -> None:
    draw_curves([train(1, loss=1.0)], tmp_path / "title.png", title)
    png(tmp_path / "title.png")


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"matplotlib.*replicax\[cli\]"):
        draw_curves([], tmp_path / "curves.png", "none")
