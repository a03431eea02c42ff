"""What all processes must have the same of before they compute: the model and the program."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from replicax.cluster.agreement import agree
from replicax.cluster.link import Link, current_link
from replicax.core.digest import describe_leaves
from replicax.core.models.split import PyTree


def agree_on_model(model: PyTree, seed: int) -> None:
    """Raise `AgreementError` where the processes start from other numbers.

    Args:
        model: a process's own arrays; those that lie on several processes are one for all.
        seed: of the run.
    """
    leaves = jax.tree.leaves(model)
    if current_link() is None or any(map(_is_shared, leaves)):
        return
    agree("the initial model", {"seed": seed, **describe_leaves(model)})


def agree_on_program(
    what: str,
    settings: Mapping[str, Any],
    mesh: Mesh,
    arguments: tuple[Any, Any],
    lowered: jax.stages.Lowered,
) -> None:
    """Raise `AgreementError` where the processes are about to run different programs.

    Args:
        what: the program, in words.
        settings: what the user chose.
        mesh: of all processes' devices.
        arguments: the state and the batch.
        lowered: the program.
    """
    link = current_link()
    if link is None:
        return
    state, batch = arguments
    fields = {
        **settings,
        "mesh": {**mesh.shape, "devices": [device.id for device in mesh.devices.flat]},
        "state": _shapes(state),
        "batch": _shapes(batch),
    }
    agree(what, fields)
    text = lowered.as_text()
    digests = link.gather(link.unique(what), hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) > 1:
        _name_the_line(what, text.splitlines(), link)


def _name_the_line(what: str, lines: list[str], link: Link) -> None:
    """Raise `AgreementError` with the first line that differs: a constant, most often."""
    own = [zlib.crc32(line.encode()) for line in lines]
    checksums = link.gather(link.unique(f"{what}, line by line"), own)
    shortest = min(map(len, checksums))
    differing = (n for n in range(shortest) if len({sums[n] for sums in checksums}) > 1)
    first = next(differing, shortest)
    line = lines[first].strip() if first < len(lines) else "its end"
    agree(f"the program of {what}", {f"line {first + 1}": line})


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_shared(leaf: Any) -> bool:
    """Whether other processes hold parts of `leaf`."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
