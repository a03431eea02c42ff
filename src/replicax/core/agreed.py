"""What all processes must have the same of before they compute: the model and the program."""

import hashlib
import zlib
from typing import Any

import jax

from replicax.core.job import Job
from replicax.core.leaves import describe_leaves
from replicax.core.models.definition import PyTree
from replicax.core.program import Configuration


def agree_on_model(job: Job, model: PyTree, seed: int) -> None:
    """Raise `AgreementError` where the processes start from other numbers."""
    leaves = jax.tree.leaves(model)
    if job.processes == 1 or any(map(_is_shared, leaves)):
        return
    job.agree("the initial model", {"seed": seed, **describe_leaves(model)})


def agree_on_program(
    configuration: Configuration,
    what: str,
    arguments: tuple[Any, Any],
    lowered: jax.stages.Lowered,
) -> None:
    """Raise `AgreementError` where the processes are about to run different programs."""
    job, mesh, (state, batch) = configuration.job, configuration.mesh, arguments
    if job.processes == 1:
        return
    fields = {
        **configuration.names(),
        "mesh": {**mesh.shape, "devices": [device.id for device in mesh.devices.flat]},
        "state": _shapes(state),
        "batch": _shapes(batch),
    }
    job.agree(what, fields)
    text = lowered.as_text()
    digests = job.gather(what, hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) > 1:
        _name_the_line(job, what, text.splitlines())


def _name_the_line(job: Job, what: str, lines: list[str]) -> None:
    """Raise `AgreementError` with the first line that differs: a constant, most often."""
    own = [zlib.crc32(line.encode()) for line in lines]
    checksums = job.gather(f"{what}, line by line", own)
    shortest = min(map(len, checksums))
    differing = (n for n in range(shortest) if len({sums[n] for sums in checksums}) > 1)
    first = next(differing, shortest)
    line = lines[first].strip() if first < len(lines) else "its end"
    job.agree(f"the program of {what}", {f"line {first + 1}": line})


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_shared(leaf: Any) -> bool:
    """Whether other processes hold parts of `leaf`."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
