"""The numbers of a text, so that a test need not hold its words."""

import re


def figures(text: str) -> list[str]:
    """Return the numbers of a text in their order, as they are written: `["1,000", "2.5", "1e-06"]`.

    Digits inside a name (`h100`, `float32`) are no number, and a unit that follows is left out.
    """
    return re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)*(?:e[+-]?\d+)?", text)
