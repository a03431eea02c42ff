"""MkDocs hook: contents of the API reference, links of names to it, and where a page is edited."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REFERENCE = "api/"
DOCUMENTED = re.compile(r"^::: replicax\.([\w.]+)$", re.MULTILINE)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
# Links, names of parameters, headings and blocks of code get no links; names in other code do.
PLAIN = re.compile(
    r"<(a|b|h[1-6]|pre|strong)\b.*?</\1>|(?:<code>)?\bdocs/([\w-]+)\.md(?:</code>)?"
    r"|<code>([^<]+)</code>|<[^>]+>",
    re.DOTALL,
)
NAME = re.compile(r"(?:(rx|replicax)\.)?([A-Za-z_][\w.]*)")
CODE, FLAG = re.compile(r"<code>[^<]*</code>"), re.compile(r"--\w[\w-]*")
NAMED = re.compile(r"[A-Z]|(hooks|errors|optimizers|types)\.")


def on_config(config: Any) -> None:
    """Offer to edit a page where the package has an address to do it at."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Source", "")
    config.repo_name = "Source"
    if not config.repo_url:
        config.edit_uri = ""  # or each page warns of an address that is none


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Add the table of contents to the first page of the reference."""
    if page.file.src_uri != f"{REFERENCE}index.md":
        return markdown
    return f"{markdown}\n" + contents(re.findall(rf"{REFERENCE}\w+\.md", str(config.nav)))


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
    paths = {
        path
        for page in (ROOT / "docs" / REFERENCE).glob("*.md")
        for path in DOCUMENTED.findall(page.read_text(encoding="utf-8"))
    }
    short = {path.rpartition(".")[2]: path for path in paths}
    is_reference = page.file.src_uri.startswith(REFERENCE)

    def linked(part: re.Match[str]) -> str:
        guide, code = part[2], part[3]
        if guide and is_reference:
            target = files.get_file_from_path(f"{guide}.md")
            return f'<a href="{target.url_relative_to(page.file)}">{target.page.title}</a>'
        name = code and NAME.match(code)
        if not name or not (name[1] or (is_reference and name[0] == code and NAMED.match(code))):
            return part[0]
        first, *members = name[2].split(".")
        if members and f"{first}.{members[0]}" in paths:  # a function of a public module
            first = f"{first}.{members.pop(0)}"
        elif first not in short:
            return part[0]
        target = ".".join(["replicax", short.get(first, first), *members])
        text, rest = name[0], code[name.end() :]
        return f'<code><autoref identifier="{target}" optional>{text}</autoref>{rest}</code>'

    whole = r'<span class="flag">\g<0></span>'  # or a line ends after its dashes
    return CODE.sub(lambda code: FLAG.sub(whole, code[0]), PLAIN.sub(linked, html))
