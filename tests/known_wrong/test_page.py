"""The table on the page on troubleshooting is the one that is read."""

from pathlib import Path

from replicax.known_wrong.known_table import KnownWrong, known_table

PAGE = Path(__file__).parents[2] / "docs/troubleshooting.md"
WORDS = {
    "say": "a line at the start",
    "refuse": "refused where the self-test fails",
    "list": "in `doctor`",
}


def markdown(row: KnownWrong) -> str:
    """Return the row of the page."""
    devices = f"{row.device} {row.platform}".strip()
    answer = WORDS.get(row.answer) or f"avoided by `{'`, `'.join(row.options)}`"
    tested = "yes" if row.self_test else ""
    where = f"[{row.name}]({row.link})" if row.link.startswith("https:") else row.name
    cells = (where, f"{row.package}: {row.versions}", devices, row.wrong, answer, tested, row.fix)
    return f"| {' | '.join(cells)} |"


def test_the_page_has_every_row() -> None:
    table = "\n".join(markdown(row) for row in known_table())
    assert f"|\n{table}\n\n" in PAGE.read_text(), f"the table of {PAGE} is now\n{table}"
