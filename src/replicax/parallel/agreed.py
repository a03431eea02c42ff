"""What all processes must have the same of before they compute together: the model and the step."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from replicax.cluster.agreement import agree
from replicax.cluster.link import current_link
from replicax.data.digest import describe_leaves
from replicax.parallel.model import PyTree


def agree_on_model(model: PyTree, seed: int) -> None:
    """Raise `AgreementError` where the processes start from other numbers.

    Args:
        model: a process's own arrays; those that lie on several processes are one for all.
        seed: of the run.
    """
    leaves = jax.tree.leaves(model)
    if current_link() is None or any(map(_is_shared, leaves)):
        return
    agree("the initial model", {"seed": seed, **describe_leaves(jax.tree.map(np.asarray, model))})


def agree_on_step(
    settings: Mapping[str, Any], mesh: Mesh, state: Any, batch: Any, lowered: jax.stages.Lowered
) -> None:
    """Raise `AgreementError` where the processes are about to run different programs.

    Args:
        settings: what the user chose.
        mesh: of all processes' devices.
        state: the arrays of the state.
        batch: the arrays of the batch.
        lowered: the step.
    """
    if current_link() is None:
        return
    text = lowered.as_text()
    fields = {
        **settings,
        "mesh": {**mesh.shape, "devices": [device.id for device in mesh.devices.flat]},
        "state": _shapes(state),
        "batch": _shapes(batch),
    }
    agree("the step", fields)
    _agree_on_program(text)


def _agree_on_program(text: str) -> None:
    """Name the first line that differs: a constant, most often."""
    link = current_link()
    assert link is not None
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(link.gather(link.unique("the program"), digest))) == 1:
        return
    lines = text.splitlines()
    checksums = link.gather(
        link.unique("the program's lines"), [zlib.crc32(line.encode()) for line in lines]
    )
    shortest = min(map(len, checksums))
    differing = (n for n in range(shortest) if len({sums[n] for sums in checksums}) > 1)
    first = next(differing, shortest)
    agree("the program", {f"line {first + 1}": lines[first].strip() if first < len(lines) else "its end"})


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_shared(leaf: Any) -> bool:
    """Whether other processes hold parts of `leaf`."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
