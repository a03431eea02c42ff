"""What a command says of a recipe's data."""

import textwrap
from typing import Any

import jax
import numpy as np

from replicax.core.job import Alone
from replicax.core.sources import as_source
from replicax.errors import ConfigError

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


def first_rows(source: Any, rows: int) -> Any:
    """The first rows of a source, as host arrays; the first batches where it has whole ones.

    Raises:
        ConfigError: it has fewer rows.
    """
    opened = as_source(source, rows, Alone(), shuffle=False, seed=0)
    parts: list[Any] = []
    count = 0
    for data, index in opened.epoch(0):
        parts.append(data)
        count += len(index)
        if count >= rows:
            break
    if count < rows:
        raise ConfigError(
            f"the source has {count} rows and {rows} are needed: give it more, or use fewer "
            "--devices"
        )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:rows], *parts)
