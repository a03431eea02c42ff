"""The files of a bench."""

import dataclasses
import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.results import CASE, extreme, layouts, make_bench, scaled
from matplotlib.text import Text
from support.pictures import saved_figures
from support.tiers import exhaustive

from replicax.bench.bench_result import Bench
from replicax.bench.plots import draw_bench
from replicax.bench.save import bench_json, read_part, write_bench, write_part


@pytest.mark.parametrize("bench", [extreme(), scaled(1, 2)], ids=["extreme", "usual"])
def test_a_part_comes_back_as_it_was(bench: Bench, tmp_path: Path) -> None:
    write_part(bench, tmp_path / "part.json")
    assert read_part(tmp_path / "part.json") == bench


def test_json_has_every_round_and_what_follows() -> None:
    plain = json.loads(json.dumps(bench_json(scaled(1, 2)), allow_nan=False))
    assert plain["environment"]["processor"] == "A Processor"
    (case, *_), rest = plain["cases"], plain
    assert case["rounds"]["seconds_per_step"] == [0.01, 0.02, 0.03]
    assert case["median_and_quartiles"]["seconds_per_step"] == [0.02, 0.015, 0.025]
    assert case["rounds"]["tokens_per_second"] is None
    assert case["flops_per_second"] == pytest.approx(100e9)
    assert case["share_of_product"] == pytest.approx(0.25)
    assert rest["cases"][1]["collectives"] == [{"kind": "all-reduce", "count": 1, "bytes": 4008}]
    assert rest["cases"][1]["rounds"]["weak_efficiency"] == pytest.approx([2**0.9] * 3)


@pytest.mark.parametrize(
    "bench",
    [scaled(1, 2, 8), *map(exhaustive, [scaled(2, 6), scaled(4), make_bench(CASE)]), extreme()],
    ids=["usual", "no single device", "one count", "one case", "extreme"],
)
def test_all_files_are_written(bench: Bench, tmp_path: Path) -> None:
    paths = write_bench(bench, tmp_path / "new")
    assert [path.name for path in paths] == ["bench.json", "bench.md", "scaling.png"]
    assert all(path.stat().st_size > 500 for path in paths)
    assert "](scaling.png)" in paths[1].read_text()
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_layouts_have_their_own_picture_and_figures(tmp_path: Path) -> None:
    paths = write_bench(layouts(), tmp_path)
    assert [path.name for path in paths] == ["bench.json", "bench.md", "layouts.png"]
    assert "](layouts.png)" in paths[1].read_text()
    case = json.loads(paths[0].read_text())["cases"][-1]
    assert case["layout"] == {
        "name": "stages=4",
        "state_bytes_per_device": 1_000_000,
        "sent_bytes": 20040.0,
        "bubble": pytest.approx(3 / 11),
    }
    assert "layout" not in bench_json(scaled(1, 2))["cases"][0]


@pytest.mark.parametrize("size", [1e-4, 1.0, 5000.0])
def test_no_words_of_a_picture_of_layouts_overlap(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, drawn = Text.draw, {}

    def watched(self: Text, renderer: Any) -> None:
        draw(self, renderer)
        if self.get_text() and self.get_visible():
            drawn[id(self)] = self.get_text(), self.get_window_extent(renderer)

    monkeypatch.setattr(Text, "draw", watched)
    bench = dataclasses.replace(layouts(size=size), notes=("too long, " * 20, "and another"))
    picture = io.BytesIO()
    draw_bench(bench, picture)
    assert len(drawn) > 25
    width, height = struct.unpack(">II", picture.getvalue()[16:24])
    boxes = list(drawn.values())
    for place, (text, box) in enumerate(boxes):
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, text
        assert [other for other, each in boxes[place + 1 :] if box.overlaps(each)] == [], text


@pytest.mark.parametrize(("efficiency", "marked"), [(2.09, True), (1.004, False), (0.9, False)])
def test_an_efficiency_above_100_percent_is_marked_and_notes_are_in_the_picture(
    efficiency: float, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = CASE, dataclasses.replace(CASE, devices=2)
    two = dataclasses.replace(two, efficiency=dict.fromkeys(two.efficiency, (efficiency,)))
    bench = dataclasses.replace(make_bench(one, two), notes=("disturbed",))
    figures = saved_figures(monkeypatch)
    draw_bench(bench, io.BytesIO())
    words = [text.get_text() for text in figures[0].findobj(Text)]
    assert "disturbed" in words
    assert any("100%" in text for text in words) is marked
    table = str(bench).splitlines()
    assert any("% *" in line for line in table) is marked
    assert any(line.startswith("*: ") for line in table) is marked


def test_without_matplotlib_the_text_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    paths = write_bench(scaled(1, 2), tmp_path)
    assert [path.name for path in paths] == ["bench.json", "bench.md"]
    text = paths[1].read_text()
    assert "[cli]" in text
    assert "](scaling.png)" not in text
