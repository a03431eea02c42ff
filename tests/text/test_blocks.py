"""Results in notebooks: HTML that is escaped, takes the page's colors, and is whole."""

import dataclasses
import math
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bench.results import CASE, make_bench

import replicax as rx
from replicax.text.checks import Check
from replicax.train.files.records import Record
from replicax.train.hooks.loss_curve import LossCurve
from replicax.train.run.summary import Fit
from replicax.verify.verification import Verification


class Page(HTMLParser):
    """HTML as its elements and text; every element must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open
        for color in re.findall(r"(?:color|background|fill|stroke)[:=][\"']?([^;\"']+)", html):
            # Nothing is black, white, or of a color that a page cannot set, but for the marks.
            assert color in KNOWN, color

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


KNOWN = {"currentColor", "none", "#d9483b", "#0072B2", "#D55E00", "#009E73"}


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch["<x>"] @ model["<w>"] - batch["y"]) ** 2


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    return rx.DataParallel(loss, optax.sgd(0.1))


SOURCE = {"<x>": np.ones((20, 3), np.float32), "y": np.ones(20, np.float32)}
MODEL = {"<w>": jnp.zeros(3)}


def test_a_batch_says_what_it_holds(dp: rx.DataParallel) -> None:
    *_, batch = dp.feed(SOURCE, batch_size=16)
    assert repr(batch).startswith("Batch(16 rows, 4 ")
    assert repr(batch).endswith(": <x> float32[16, 3], y float32[16])")
    page = Page(batch._repr_html_())
    size = 16 // len(jax.devices())
    row = page.texts.index("<x>")
    assert page.texts[row : row + 4] == ["<x>", "float32", "[16, 3]", f"[{size}, 3]"]
    assert repr(rx.Batch(np.ones((2, 3)), np.ones(2), np.arange(2))) == (
        "Batch(2 rows: data float64[2, 3])"
    )
    many = {f"{n:02}": np.ones(2) for n in range(60)}
    named = rx.Batch(many, np.ones(2), np.arange(2))
    assert repr(named).endswith("05 float64[2], 54 more)")
    assert Page(named._repr_html_()).texts[-1] == "and 20 more"


def test_a_batch_of_anything_has_a_repr(dp: rx.DataParallel) -> None:
    batch = next(iter(dp.feed(SOURCE, batch_size=16)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, batch)
    assert repr(shardings).startswith("Batch(? rows: <x> NamedSharding[]")
    seen = []
    jax.eval_shape(lambda traced: seen.append(repr(traced)), batch)
    assert seen == ["Batch(16 rows: <x> float32[16, 3], y float32[16])"]


def test_a_state_lists_its_parameters(dp: rx.DataParallel) -> None:
    page = Page(dp.init(MODEL)._repr_html_())
    assert page.texts[-4:] == ["<w>", "float32", "[3]", "[3]"]


def test_a_verification_shows_every_check_and_marks_what_failed() -> None:
    found = Verification(
        [
            Check("parity", "jit", "pass", "a < b"),
            Check("parity", "pmap", "fail", "c", "the cause"),
            Check("traffic", "jit", "fail", "d", "the cause"),
        ]
    )
    html = found._repr_html_()
    assert Page(html).texts[4:] == [
        *("parity", "jit", "a < b", "pass"),
        *("pmap", "c", "cause: the cause", "fail"),
        *("traffic", "jit", "d", "cause: as above", "fail"),
    ]
    assert html.count("#d9483b") == 2


def test_a_plan_and_a_benchmark_are_the_same_words_as_text_and_html(dp: rx.DataParallel) -> None:
    plan = rx.plan(dp, MODEL, SOURCE, target="v100:8", by_formula=True)
    for each in (plan, make_bench(CASE, dataclasses.replace(CASE, mode="pmap"))):
        shown = "".join(Page(each._repr_html_()).texts)
        # A heading that is split into two lines is whole in HTML.
        in_html, in_text = (Counter(re.sub(r"[-\s]", "", text)) for text in (shown, str(each)))
        assert in_html == in_text
    assert repr(plan).startswith("Plan(v100:8, fits=True, 3 rows ")


def records(steps: int, loss: Any) -> list[Record]:
    return [Record("train", n + 1, 0, {"<m>": 1.0, "loss": loss(n)}, 8, 1.0) for n in range(steps)]


def test_a_fit_shows_its_curve_and_the_last_figures() -> None:
    found = records(5000, lambda n: 1 / (n + 1))
    found.append(Record("eval", 5000, 0, {"loss": 0.5, "right": 0.75}, 8, 1.0))
    html = Fit(None, found, 5000, 8, 1.0, False, stopped="a < b")._repr_html_()  # type: ignore[arg-type]
    page = Page(html)
    table = page.texts.index("train, step 5,000")
    assert page.texts[table - 3 :] == [
        *("loss", "<m>", "right", "train, step 5,000", "0.0002", "1", "-"),
        *("eval, step 5,000", "0.5", "-", "0.75", "a < b"),
    ]
    assert page.tags.count("circle") == 1  # the only evaluation
    assert page.texts[1:6] == ["0.001", "0.01", "0.1", "2,000", "4,000"]
    assert len(html) < 8_000


@pytest.mark.parametrize(
    ("steps", "loss", "drawn"),
    [
        (0, lambda n: 1.0, False),
        (1, lambda n: 1.0, False),
        (2, lambda n: math.nan, False),
        (2, lambda n: 1.0, True),
        (9, lambda n: math.inf if n == 4 else -n, True),
        (9, lambda n: 1e-9 * n, True),
        (9, lambda n: 1e30 ** (n - 4), True),
    ],
)
def test_any_loss_has_a_curve(steps: int, loss: Any, drawn: bool) -> None:
    html = LossCurve(records(steps, loss)).html()
    assert bool(html) == drawn
    assert "nan" not in html
    assert "inf" not in html
    Page(html)
    heights = [float(each) for each in re.findall(r"[ML][\d.]+ ([\d.-]+)", html)]
    assert all(0 <= height <= 190 for height in heights)


def test_a_record_has_four_digits() -> None:
    record = Record("train", 3, 1, {"loss": 1 / 3}, 64, 0.5, figures={"rate": 0.1234567})
    assert repr(record) == "Record('train', step=3, epoch=1, loss 0.3333, rate 0.1235, 128 rows/s)"
    assert Page(record._repr_html_()).texts[1:] == [
        "loss",
        "0.3333",
        "rate",
        "0.1235",
        "rows/s",
        "128",
    ]
