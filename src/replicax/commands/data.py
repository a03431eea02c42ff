"""What a command says of a recipe's data."""

import textwrap
from typing import Any

WIDTH = 80


def print_data(recipe: Any) -> None:
    """Print which data the recipe has found, where it tells."""
    if not hasattr(recipe, "data_description"):
        return
    text = f"data   {recipe.data_description()}"
    lines = textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False
    )
    print(*lines, sep="\n", flush=True)
