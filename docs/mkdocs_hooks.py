"""MkDocs hook: adapt the pages, written for a reader of the repository, to the site.

The site also has each page as Markdown beside its HTML, and llms.txt, the list of these files.
"""

import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!images/)[^)]*\)")
REFERENCE = re.compile(r"^::: replicax\.([\w.]+)\n(?: +.*\n)*", re.MULTILINE)
"""A name in the API reference, and the options of how it is shown."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files of the repository by their text, since the site has only pages."""
    depth = page.file.src_uri.count("/")
    text = OUTSIDE.sub(lambda link: link[0] if _stays(link[0], depth) else link[1], markdown)
    page.meta["markdown"] = text
    return text


def on_page_context(context: Any, *, page: Any, config: Any, nav: Any, **_: Any) -> Any:
    """Write the page as Markdown, and llms.txt with the first page."""
    site = Path(config.site_dir)
    path = site / page.file.src_uri
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_whole(page), encoding="utf-8")
    if page.file.src_uri == "index.md":
        lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
        for section in nav:
            lines += ["", f"## {section.title}", ""]
            lines += [
                f"- [{each.title}]({each.file.src_uri}): {_first_sentence(_whole(each))}"
                for each in _pages(section)
            ]
        (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return context


def _pages(section: Any) -> Iterator[Any]:
    """Yield the pages of a section of the navigation and of the groups in it."""
    for each in section.children:
        yield from _pages(each) if each.is_section else [each]


def _whole(page: Any) -> str:
    """Return a page's Markdown with the docstrings that the reference shows."""
    return REFERENCE.sub(lambda found: _documented(found[1]), page.meta["markdown"])


def _documented(name: str) -> str:
    """Return a public name's signature and docstring as Markdown; of other types, the name."""
    import replicax

    if name.count(".") > 1 or name.partition(".")[0] not in replicax.__all__:
        return f"### `replicax.{name}`\n"
    value = attrgetter(name)(replicax)
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    signature = "" if is_error or not callable(value) else str(inspect.signature(value))
    return f"### `{name}{signature}`\n\n{inspect.getdoc(value)}\n"


def _first_sentence(text: str) -> str:
    """Return the first sentence of the first paragraph that is prose."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = (each.strip() for each in prose.split("\n\n"))
    first = next(each for each in paragraphs if re.match(r"[\w`*\[]", each))
    return " ".join(re.split(r"(?<=\.)\s", first, maxsplit=1)[0].split()).rstrip(":")


def _stays(link: str, depth: int) -> bool:
    """Whether a link on a page at `depth` leads to another page."""
    return link.count("../") <= depth
