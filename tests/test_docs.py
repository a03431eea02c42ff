"""The tutorials print what they show; the site has every page and every public name."""

import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from support.public_names import PLACES
from support.tiers import EXHAUSTIVE, only

import replicax

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
PAGES = [
    ROOT / f"docs/{name}.md"
    for name in (
        "concepts",
        "from-pmap",
        "from-pytorch",
        "metrics",
        "walk",
        "exact-mean",
        "markers",
        "quickstart",
    )
]


@EXHAUSTIVE
@pytest.mark.parametrize("page", only(PAGES[:3], [*PAGES, *TUTORIALS]), ids=lambda page: page.stem)
def test_a_page_prints_and_draws_what_it_shows(page: Path) -> None:
    command = [sys.executable, ROOT / "docs/run_page.py", page]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT / "src")}
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the first start of all says where that is
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_output_is_in_its_page() -> None:
    for page in (*PAGES, *TUTORIALS):
        assert "```text\n```" not in page.read_text(encoding="utf-8"), page.name


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    shown = re.findall(r"^::: replicax\.([\w.]+)$", pages, re.M)
    assert len(shown) == len(set(shown))
    assert set(PLACES.values()) <= set(shown)
    rooms = {module.name for module in pkgutil.iter_modules(replicax.__path__)}
    assert {name.partition(".")[0] for name in shown} <= rooms | set(replicax.__all__)
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/api/index.md").read_text(), re.M)
    assert set(PLACES.values()) <= set(re.findall(r"`([\w.]+)`", "".join(table)))


def test_pictures_have_no_background() -> None:
    """A white one is a slab on a dark page."""
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    assert len(pictures) > 5
    for picture in pictures:
        image = matplotlib.image.imread(picture)
        assert image.shape[2] == 4, picture
        assert image[0, 0, 3] == 0, picture
        assert image[..., 3].max() == 1, picture


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in headings}


def test_no_link_is_dead() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for number, url in re.findall(r"\[#(\d+)\]\((\S+)\)", text):
            assert url.endswith(f"/{number}"), (page, url)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if ":" in path:
                continue
            target = page.parent / path if path else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)


def test_rows_of_a_table_have_the_columns_of_its_header() -> None:
    """A cell too many is dropped by the site, and moves the others; `|` in a cell is escaped."""
    tables = 0
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for table in re.findall(r"(?:^ *\|.*\n)+", text, re.M):
            tables += 1
            rows = table.splitlines()
            columns = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
            assert set(columns) == {columns[0]}, (page.name, rows[columns.index(max(columns))])
            assert set(rows[1].strip()) <= set("|-: "), (page.name, rows[1])
    assert tables > 100


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    pages = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.stem for path in tmp_path.rglob("*.html")}
    assert pages <= {path.stem for path in tmp_path.rglob("*.md")}
    listed = re.findall(r"^- \[.+\]\((.+\.md)\): \S", (tmp_path / "llms.txt").read_text(), re.M)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")} == set(listed)
    assert "Args:" in (tmp_path / "api/step.md").read_text()  # with the docstrings
    assert (tmp_path / "search/search_index.json").exists()
    sources = re.findall(r'<script[^>]* src="([^"]+)"', (tmp_path / "index.html").read_text())
    assert all((tmp_path / source).exists() for source in sources)  # nothing is fetched
    check_reference(tmp_path / "api")


def check_reference(folder: Path) -> None:
    """Public names have an anchor, and are links in signatures, docstrings and lists."""
    texts = {path: path.read_text() for path in folder.glob("*.html")}
    articles = {path: text[text.index("<article") :] for path, text in texts.items()}
    everything = "".join(articles.values())
    ids = set(re.findall(r'id="replicax\.([\w.]+)"', everything))
    assert set(PLACES.values()) <= ids
    assert "Bases:" not in everything
    for path, article in articles.items():
        bare = re.sub(r"<a\b.*?</a>|<h\d.*?</h\d>", "", article, flags=re.S)
        text = re.sub(r"<pre>.*?</pre>", "", bare, flags=re.S)
        assert re.findall(r"<code>((?:rx|replicax)\.\w.*?)</code>", text) == [], path.name
        assert re.findall(r"\bdocs/[\w-]+\.md", text) == [], path.name
        types = re.findall(r'<span title="(replicax\.[\w.]+\.([A-Z]\w*))">', bare)
        assert types == [] or path.stem == "types", path.name
