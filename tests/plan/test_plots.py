"""Pictures of a plan: what is in it can be seen in them."""

import itertools
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
from matplotlib.patches import Rectangle
from plan.plans import (
    ABOUT,
    KINDS,
    by_formula,
    make_plan,
    need,
    not_even_one,
    scaled,
    too_large,
    unknown_chip,
)
from support.tiers import only

from replicax.errors import MissingDependencyError
from replicax.plan.plots import draw_memory, draw_scaling, shown_sizes
from replicax.plan.result import Plan
from replicax.plan.target import parse_target


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved."""
    kept: list[Any] = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure: Any, *args: Any, **options: Any) -> None:
        kept.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return kept


def texts(figure: Any) -> list[str]:
    """All labels inside the axes, and in the legend."""
    (legend,) = figure.legends
    inside = [text.get_text() for text in figure.axes[0].texts]
    return inside + [text.get_text() for text in legend.get_texts()]


def redrawn(figure: Any) -> Any:
    """The figure in the dots of its own, as `get_window_extent` wants it."""
    figure.draw_without_rendering()
    return figure


def stacks(figure: Any) -> list[list[Rectangle]]:
    """The parts of each bar, from below; hatched samples for the legend left out."""
    bars = [each for each in figure.axes[0].patches if each.get_height() > 0]
    return [list(parts) for _, parts in itertools.groupby(bars, key=lambda bar: bar.get_x())]


def test_bars_are_as_high_as_the_bytes(figures: list[Any], tmp_path: Path) -> None:
    draw_memory(make_plan(), tmp_path / "memory.png")
    found = stacks(figures[0])
    heights = [sum(part.get_height() for part in parts) for parts in found]
    assert heights == pytest.approx([11.0, 16.0, 17.2, 81.0])
    # Four fifths of what fits are temporaries, and they lie above the rest.
    assert [part.get_height() for part in found[0]] == pytest.approx([2.2, 8.8])
    assert [bool(parts[0].get_hatch()) for parts in found] == [False, False, True, True]
    axis = figures[0].axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["8", "12", "13", "64"]
    assert axis.get_ylabel() == "memory of a device in GB"


def test_the_capacity_is_a_line_and_the_largest_is_named(
    figures: list[Any], tmp_path: Path
) -> None:
    draw_memory(make_plan(), tmp_path / "memory.png")
    (line,) = figures[0].axes[0].lines
    # 15.75 GiB of a v5e, as libtpu's compiler says.
    assert line.get_ydata() == pytest.approx([15.75 * 2**30 / 1e9] * 2)
    found = texts(figures[0])
    assert "asked\n11 GB" in found
    assert "largest\n16 GB" in found
    assert "16.9 GB: what a device can hold" in found
    assert "does not fit, takes at least" in found


def test_without_a_capacity_there_is_no_line(figures: list[Any], tmp_path: Path) -> None:
    draw_memory(unknown_chip(), tmp_path / "memory.png")
    assert not figures[0].axes[0].lines
    assert not any("hold" in text for text in texts(figures[0]))


def test_by_formula_has_bars_in_one_piece(figures: list[Any], tmp_path: Path) -> None:
    draw_memory(by_formula(), tmp_path / "memory.png")
    assert [len(parts) for parts in stacks(figures[0])] == [1, 1, 1]
    assert {"all, by formula", "does not fit"} <= set(texts(figures[0]))
    assert figures[0].get_suptitle().endswith("by formula")


def test_a_bar_beyond_the_picture_keeps_its_label_inside(
    figures: list[Any], tmp_path: Path
) -> None:
    draw_memory(not_even_one(), tmp_path / "memory.png")
    axis = figures[0].axes[0]
    assert axis.get_ylim()[1] < 50
    assert {text.get_text() for text in axis.texts} == {"250 GB", "asked\n300 GB"}
    assert all(text.xy[1] < axis.get_ylim()[1] for text in axis.texts)


def test_labels_do_not_overlap_nor_cross_the_capacity(figures: list[Any], tmp_path: Path) -> None:
    sizes = tuple(need(rows, rows / 2) for rows in range(20, 45))
    plan = make_plan(asked=need(20, 10.0), largest=need(33, 16.5), sizes=sizes)
    draw_memory(plan, tmp_path / "memory.png")
    axis = redrawn(figures[0]).axes[0]
    boxes = [text.get_window_extent() for text in axis.texts]
    assert len(boxes) == 14
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    height = axis.transData.transform((0, plan.target.chip.usable_bytes / 1e9))[1]
    assert not any(box.y0 < height < box.y1 for box in boxes[:8])


def test_shown_sizes_are_those_near_the_border_and_what_was_asked() -> None:
    sizes = tuple(need(rows, rows / 2) for rows in range(1, 60))
    plan = make_plan(asked=need(2, 1.0), largest=need(33, 16.5), sizes=sizes)
    rows = [each.rows for each in shown_sizes(plan)]
    assert rows == sorted(rows)
    assert len(rows) == 14
    assert {2, 33, 34} <= set(rows)


def curves(figure: Any) -> dict[str, Any]:
    """Lines by what the legend calls them."""
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_curves_are_the_efficiency_by_devices(figures: list[Any], tmp_path: Path) -> None:
    plan = make_plan("h100:64", scaling=scaled(parse_target("h100:64")))
    draw_scaling(plan, tmp_path / "scaling.png")
    assert plan.scaling is not None
    found = curves(figures[0])
    weak, strong = found["weak: 8 rows a device"], found["strong: 512 rows in all"]
    assert list(weak.get_xdata()) == [2**power for power in range(18)]
    assert list(weak.get_ydata()) == [100 * point.efficiency for point in plan.scaling.weak]
    assert list(strong.get_xdata())[-1] == 512
    assert (weak.get_linestyle(), strong.get_linestyle()) == ("-", "--")
    axis = figures[0].axes[0]
    labels = [tick.get_text() for tick in axis.get_xticklabels()]
    assert labels == ["1", "10", "100", "1,000", "10,000", "100,000"]
    assert axis.get_xlim()[1] > 131_072


def test_the_target_and_where_more_stop_paying_are_marked(
    figures: list[Any], tmp_path: Path
) -> None:
    draw_scaling(make_plan("h100:16"), tmp_path / "scaling.png")
    axis = figures[0].axes[0]
    assert any(list(line.get_xdata()) == [16, 16] for line in axis.lines)
    (dot,) = [line for line in axis.lines if line.get_marker() == "o" and len(line.get_xdata())]
    # The weak curve pays to its end, so it has no dot.
    assert list(dot.get_xdata()) == [64]
    found = texts(figures[0])
    assert {"h100:16", "64", "more stop paying"} <= set(found)


def test_a_plan_without_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan\.scaling"):
        draw_scaling(make_plan(scaling=None), tmp_path / "scaling.png")


@pytest.mark.parametrize("kind", only(["fits", "not even one", "huge"], KINDS))
def test_any_plan_is_drawn_and_nothing_is_cut_off(
    kind: str, figures: list[Any], tmp_path: Path
) -> None:
    plan: Plan = KINDS[kind]()
    draw_memory(plan, tmp_path / "memory.png")
    if plan.scaling is not None:
        draw_scaling(plan, tmp_path / "scaling.png")
    for figure in map(redrawn, figures):
        assert len(figure.axes[0].patches) + len(figure.axes[0].lines) > 0
        canvas = figure.bbox
        parts = [figure.legends[0], figure._suptitle, *figure.axes[0].texts]
        for box in (part.get_window_extent() for part in parts):
            assert canvas.x0 <= box.x0
            assert box.x1 <= canvas.x1
            assert box.y1 <= canvas.y1


def test_a_name_is_text_and_not_mathematics(figures: list[Any], tmp_path: Path) -> None:
    draw_memory(make_plan(about={**ABOUT, "name": r"$\frac$ a_b"}), tmp_path / "memory.png")
    assert figures[0].get_suptitle().startswith(r"$\frac$ a_b")


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (draw_memory, draw_scaling):
        with pytest.raises(MissingDependencyError, match=r"matplotlib.*replicax\[cli\]"):
            draw(too_large(), tmp_path / "none.png")
