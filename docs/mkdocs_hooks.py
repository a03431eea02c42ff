"""MkDocs hook: adapt the pages, written for a reader of the repository, to the site."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!images/)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files of the repository by their text, since the site has only pages."""
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda link: link[0] if _stays(link[0], depth) else link[1], markdown)


def _stays(link: str, depth: int) -> bool:
    """Whether a link on a page at `depth` leads to another page."""
    return link.count("../") <= depth
