"""MkDocs hook: adapt the pages, written for a reader of the repository, to the site."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!images/)[^)]*\)")
REFERENCE = "api/"
DOCUMENTED = re.compile(r"^::: replicax\.([\w.]+)$", re.MULTILINE)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
# Links, names of parameters, headings and blocks of code get no links; names in other code do.
PLAIN = re.compile(
    r"<(a|b|h[1-6]|pre|strong)\b.*?</\1>|(?:<code>)?\bdocs/([\w-]+)\.md(?:</code>)?|<code>([^<]+)</code>|<[^>]+>",
    re.DOTALL,
)
NAME = re.compile(r"(?:(rx|replicax)\.)?([A-Za-z_][\w.]*)")


def on_config(config: Any) -> None:
    """Offer to edit a page where the package has an address to do it at."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = urls.get("urls", {}).get("Repository", "")
    if not config.repo_url:
        config.edit_uri = None


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files of the repository by their text, since the site has only pages."""
    if page.file.src_uri == f"{REFERENCE}index.md":
        markdown += contents(re.findall(r"api/\w+\.md", str(config.nav)))
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda link: link[0] if _stays(link[0], depth) else link[1], markdown)


def _stays(link: str, depth: int) -> bool:
    """Whether a link on a page at `depth` leads to another page."""
    return link.count("../") <= depth


def contents(pages: list[str]) -> str:
    """Return a table of the pages of the reference and the names on each."""
    rows = ["| page | names |", "|---|---|"]
    for path in (ROOT / "docs" / page for page in pages):
        text = path.read_text(encoding="utf-8")
        if names := DOCUMENTED.findall(text):
            title = TITLE.findall(text)[0]
            short = (name if name[0].isupper() else name.split(".")[-1] for name in names)
            shown = ", ".join(
                f"[`{name}`][replicax.{full}]" for name, full in zip(short, names, strict=True)
            )
            rows.append(f"| [{title}]({path.name}) | {shown} |")
    return "\n".join([*rows, ""])


def on_page_content(html: str, *, page: Any, files: Any, **_: Any) -> str:
    """Link the names of the reference: `rx.fit` on all pages, `Guard` and docs/step.md there."""
    documented = {
        full.rpartition(".")[2]: full
        for path in (ROOT / "docs" / REFERENCE).glob("*.md")
        for full in DOCUMENTED.findall(path.read_text(encoding="utf-8"))
    }
    is_reference = page.file.src_uri.startswith(REFERENCE)

    def linked(part: re.Match[str]) -> str:
        guide, code = part[2], part[3]
        if guide and is_reference:
            target = files.get_file_from_path(f"{guide}.md")
            return f'<a href="{target.url_relative_to(page.file)}">{target.page.title}</a>'
        name = code and NAME.match(code)
        if not name or not (name[1] or (is_reference and name[0] == code and code[0].isupper())):
            return part[0]
        path = name[2].removeprefix("losses.").removeprefix("remat.")
        first, dot, member = path.partition(".")
        if first not in documented:
            return part[0]
        target, rest = f"replicax.{documented[first]}{dot}{member}", code[name.end() :]
        return f'<code><autoref identifier="{target}" optional>{name[0]}</autoref>{rest}</code>'

    return PLAIN.sub(linked, html)
