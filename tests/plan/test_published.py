"""The forecast against published tables; `docs/forecast.md` shows and explains each row."""

import json
import re
from pathlib import Path

import pytest
from support.published_models import resnet, vgg16
from support.published_rows import (
    LLAMA2_7B,
    LLAMA3_8B,
    MAXTEXT_22B,
    MAXTEXT_32B,
    ROWS,
    Row,
    mean_error,
)

ROOT = Path(__file__).resolve().parents[2]
MOST_POINTS = 10.0
NAMED = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def test_the_mean_error_of_what_is_public() -> None:
    """Rows chosen in advance only; the later ones are easier."""
    complete = [row for row in ROWS if row.complete]
    assert mean_error([row for row in complete if row.chosen]) <= MOST_POINTS
    assert mean_error(complete) <= MOST_POINTS


@NAMED
def test_more_devices_and_slower_links_only_cost(row: Row) -> None:
    assert 0 < row.forecast <= 1


@NAMED
def test_every_figure_has_a_source(row: Row) -> None:
    assert re.search(r"arXiv:\d{4}\.\d{5}|\w+/\w+ \S+\.(md|rst)", row.source)


def test_models_have_their_published_sizes() -> None:
    """Sizes from torchvision's documentation and Meta's model cards."""
    sizes = {
        138_357_544: vgg16(),
        25_557_032: resnet((3, 4, 6, 3)),
        44_549_160: resnet((3, 4, 23, 3)),
    }
    for size, layers in sizes.items():
        assert sum(layer.parameters for layer in layers) == size
    billions = {8.03: LLAMA3_8B, 6.74: LLAMA2_7B, 32: MAXTEXT_32B, 22: MAXTEXT_22B}
    for size, model in billions.items():
        assert model.parameters / 1e9 == pytest.approx(size, rel=0.02)


def test_vgg_and_resnet_cost_what_their_papers_say() -> None:
    # Multiplications and additions: 15.5 G for VGG-16, 3.8 G for ResNet-50 whose stride is in the
    # first convolution of a block; here, as in torchvision, it is in the second, which is 4.1 G.
    assert sum(layer.forward_flops for layer in vgg16()) / 1e9 == pytest.approx(15.5, rel=0.01)
    assert sum(layer.forward_flops for layer in resnet((3, 4, 6, 3))) / 1e9 == pytest.approx(
        4.1, rel=0.01
    )


@NAMED
def test_the_documentation_shows_it(row: Row) -> None:
    text = (ROOT / "docs/forecast.md").read_text(encoding="utf-8")
    shown = f"| {row.name} | {row.published:.1%} | {row.forecast:.1%} | {row.error:+.1f} |"
    assert shown in text


def test_the_saved_results_are_those_of_this_code() -> None:
    path = ROOT / "benchmarks/results/published.json"
    saved = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row, told in zip(ROWS, saved, strict=True):
        assert (told["name"], told["forecast"]) == (row.name, round(100 * row.forecast, 1))
