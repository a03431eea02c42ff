"""The files of a bench."""

import json
import sys
from pathlib import Path

import pytest
from bench.results import CASE, extreme, make_bench, scaled

from replicax.bench.result import Bench
from replicax.bench.save import to_json, write_bench


@pytest.mark.parametrize("bench", [extreme(), scaled(1, 2)], ids=["extreme", "usual"])
def test_json_comes_back_as_it_was(bench: Bench) -> None:
    plain = to_json(bench)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_json_has_every_round_and_what_follows() -> None:
    plain = to_json(scaled(1, 2))
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
    [scaled(1, 2, 8), scaled(2, 6), scaled(4), make_bench(CASE), extreme()],
    ids=["usual", "no single device", "one count", "one case", "extreme"],
)
def test_all_files_are_written(bench: Bench, tmp_path: Path) -> None:
    paths = write_bench(bench, tmp_path / "new")
    assert [path.name for path in paths] == ["bench.json", "bench.md", "scaling.png"]
    assert all(path.stat().st_size > 500 for path in paths)
    assert "](scaling.png)" in paths[1].read_text()
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_modes_are_drawn_in_their_colours(tmp_path: Path) -> None:
    import matplotlib.image
    import numpy as np

    *_, picture = write_bench(scaled(1, 2, 4), tmp_path)
    image = matplotlib.image.imread(picture)[..., :3]
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)):
        near = np.all(np.abs(image - np.array(colour) / 255) < 0.05, axis=-1)
        half = image.shape[1] // 2
        assert near[:, :half].sum() > 200
        assert near[:, half:].sum() > 200


def test_without_matplotlib_the_text_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    paths = write_bench(scaled(1, 2), tmp_path)
    assert [path.name for path in paths] == ["bench.json", "bench.md"]
    text = paths[1].read_text()
    assert "replicax[cli]" in text
    assert "](scaling.png)" not in text
