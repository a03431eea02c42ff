"""What the pages are for the site beyond what they are for a reader of the repository."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!images/)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Show links to files of the repository as text: the site has its pages alone."""
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda link: link[0] if _stays(link[0], depth) else link[1], markdown)


def _stays(link: str, depth: int) -> bool:
    """Whether a link leads to a page, from `depth` folders below the first."""
    return link.count("../") <= depth
