"""The README for an index of packages, where links relative to the repository are dead."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)")


class Readme(MetadataHookInterface):
    """Fills in `readme`, for every build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata of the package."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": outside(text, metadata.get("urls", {}).get("Source")),
        }


def outside(text: str, source: str | None) -> str:
    """Return Markdown whose relative links lead to `source`, an address in GitHub's form.

    Without an address links become their text, and pictures their description in italics.
    """

    def replaced(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if source:
            kind = "raw" if picture else "blob"
            return f"{picture}[{words}]({source}/{kind}/main/{path})"
        return f"*{words}*" if picture else words

    return LINK.sub(replaced, text)
