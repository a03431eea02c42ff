"""Trees of arrays in a few words, and as a table in a notebook."""

from typing import Any

import jax

from replicax.core.ground.leaves import PyTree

_MOST_WORDS, _MOST_ROWS = 6, 40


def arrays_text(tree: PyTree, name: str) -> str:
    """Return `image uint8[32, 28, 28, 1], label int32[32]`; `name` is that of a single array."""
    shown = [f"{path or name} {_kind(leaf)}{_shape(leaf)}" for path, leaf in _leaves(tree)]
    more = len(shown) - _MOST_WORDS
    return ", ".join([*shown[:_MOST_WORDS], *([f"{more} more"] if more > 0 else [])])


def arrays_html(title: str, tree: PyTree, name: str) -> str:
    """Return a table of dtypes and shapes, and of the shapes that each device holds."""
    from replicax.text.blocks import Grid, Paragraph, html_of

    leaves = _leaves(tree)
    rows = [(path or name, _kind(leaf), _shape(leaf), _part(leaf)) for path, leaf in leaves]
    more = len(rows) - _MOST_ROWS
    rest = [Paragraph(f"and {more:,} more")] if more > 0 else []
    heads = ("array", "dtype", "shape", "on each device")
    return html_of([Grid([heads, *rows[:_MOST_ROWS]], left=4), *rest], title)


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _kind(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def _shape(leaf: Any) -> str:
    return str(list(getattr(leaf, "shape", ())))


def _part(leaf: Any) -> str:
    """Return the shape of the part that a device holds; none of what is on no device."""
    sharding = getattr(leaf, "sharding", None)
    return "" if sharding is None else str(list(sharding.shard_shape(leaf.shape)))
