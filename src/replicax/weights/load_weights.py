"""`rx.load_weights`: a model with the tensors of a file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.core.ground.train_state import ModelT
from replicax.errors import DataError
from replicax.text.arguments import typed
from replicax.text.table import labelled
from replicax.text.wording import counted, named
from replicax.weights.model_leaves import ModelLeaves, leaves_of, like_leaf
from replicax.weights.rename_table import NoLeafError, PlacedTensor, Rename, RenameTable
from replicax.weights.tensor_files import Tensors, open_tensors
from replicax.weights.tensor_slices import Tied, UnfitError

_SHOWN = 3
"""Names in a message, of each kind."""


@typed
def load_weights(
    model: ModelT,
    file: str | Path,
    *,
    rename: Rename | None = None,
    skip: Sequence[str] = (),
    cast: bool = False,
) -> ModelT:
    r"""Return `model` with the weights of a file, whose names and layouts may be another library's.

    Every tensor of the file and every leaf of the model is accounted for, or it raises. It reads
    tensor by tensor, and prints one line that says what it did.

    Examples:
        >>> from safetensors.numpy import save_file
        >>> file = {"linear.weight": np.ones((3, 4)), "linear.bias": np.zeros(3)}
        >>> save_file({name: np.float32(each) for name, each in file.items()}, "linear.safetensors")
        >>> net = {"out": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
        >>> rename = {
        ...     "linear.weight": rx.weights.transposed("out.kernel"),
        ...     "linear.(bias)": r"out.\1",
        ... }
        >>> net = rx.load_weights(net, "linear.safetensors", rename=rename)
        weight linear.safetensors: 2 tensors fill 2 leaves of the model

    Args:
        model: a model of any kind that `dp.init` accepts, or its shapes (`jax.eval_shape`).
        file: a .safetensors file; a .pt, .pth or .bin file of torch, if it is installed; the
            .index.json of one in several files; or a folder with such a file, or that Orbax wrote,
            such as a run, of which statistics are read as well.
        rename: patterns (Python's `re`, of whole names; a group is `(...)`, and a dot stands for
            itself) of the file's names, and for each the dotted path of its leaf, in which `\1`
            is the text of the first group, or a place such as `rx.weights.transposed`; None for
            what is no weight. The first that matches counts. A name that none matches is the path.
        skip: patterns of names and paths to leave out on purpose, in the file and in the model,
            whose leaves stay as they are.
        cast: also round numbers that the model's dtype cannot hold; by default only conversions
            that are exact, as from bfloat16 to float32, are done.

    Returns:
        A model like the given one, which is unchanged. Its arrays are where those of `model` are.

    Raises:
        ConfigError: no such file; `model` is no model; a pattern is none.
        DataError: not such a file, or file and model do not fit; one line of each kind.
        CheckpointError: a folder of Orbax cannot be read.
        MissingDependencyError: the package that reads the file is not installed.
    """
    path, table = Path(file), RenameTable(rename or {}, skip)
    leaves = leaves_of(model)
    with open_tensors(path) as tensors:
        placed = _placed(path, table, leaves, tensors, cast)
        changed = _read(path, placed, leaves, tensors)
    if jax.process_index() == 0:
        _say(path, table, placed, leaves, tensors)
    filled: ModelT = leaves.model(changed)
    return filled


def _placed(
    path: Path, table: RenameTable, leaves: ModelLeaves, tensors: Tensors, cast: bool
) -> dict[str, PlacedTensor]:
    """Return the place of each tensor that has one.

    Raises:
        DataError: they do not fit, or leave something out.
    """
    # Arrays of the leaves' shapes that take no memory: each number is the same one.
    hollow = {p: np.broadcast_to(np.int8(0), leaf.shape) for p, leaf in leaves.by_path.items()}
    placed: dict[str, PlacedTensor] = {}
    filled = Counter[str]()
    unknown, odd, inexact = list[str](), list[str](), list[str]()
    for name, kind in tensors.kinds.items():
        try:
            placing = table.placed(name, hollow)
        except NoLeafError as error:
            (leaf,) = error.args
            if name not in tensors.optional:
                unknown.append(name if leaf == name else f"{name} (to {leaf})")
            continue
        if placing is None:
            continue
        place, groups = placing
        paths = place.paths(groups)
        where = ", ".join(paths)
        if not isinstance(place, Tied):
            # What does not fit is not missing, too.
            filled.update(dict.fromkeys(paths, 0))
        try:
            shape = place.take(hollow, groups).shape
            sizes = place.sizes(hollow, groups)
        except UnfitError as error:
            odd.append(f"{name} {list(kind.shape)}, where {where} {error}")
            continue
        if shape != kind.shape:
            odd.append(f"{name} {list(kind.shape)}, where {where} takes {list(shape)}")
            continue
        dtypes = {leaves.by_path[filled_path].dtype for filled_path in paths}
        if not cast and (wrong := [to for to in dtypes if not np.can_cast(kind.dtype, to)]):
            inexact.append(f"{name} from {kind.dtype} to {wrong[0]}")
        placed[name] = placing
        if not isinstance(place, Tied):
            for filled_path, size in zip(paths, sizes, strict=True):
                filled[filled_path] += size
    shapes = (p for p, x in leaves.by_path.items() if isinstance(x, jax.ShapeDtypeStruct))
    needed = [*leaves.weights, *shapes]
    empty = [p for p in dict.fromkeys(needed) if p not in filled and not table.skips(p)]
    partly = [
        f"{p} ({count:,} of {hollow[p].size:,} numbers)"
        for p, count in filled.items()
        if count != hollow[p].size and not odd
    ]
    _refuse(
        path,
        (unknown, "tensor", "with no leaf in the model", "name its leaf in rename=, or skip= it"),
        (empty, "leaf", "of the model without a tensor", "name its tensor in rename=, or skip= it"),
        (odd, "tensor", "of another shape", "give the model the file's sizes, or mend the rule"),
        (partly, "leaf", "not filled once", "each part takes one tensor: mend the rules"),
        (inexact, "tensor", "that would be rounded", "load into its dtype, or pass cast=True"),
    )
    return placed


def _refuse(path: Path, *faults: tuple[list[str], str, str, str]) -> None:
    """Raise `DataError` if there are faults, with a line for each kind."""
    lines = []
    for names, noun, fault, fix in faults:
        if names:
            count = counted(len(names), noun).replace("leafs", "leaves")
            lines.append(f"{path}: {count} {fault}: {named(names, _SHOWN)}; {fix}")
    if lines:
        raise DataError("\n".join(lines))


def _read(
    path: Path, placed: dict[str, PlacedTensor], leaves: ModelLeaves, tensors: Tensors
) -> dict[str, Any]:
    """Return the filled leaves; each leaves the host's memory when its last tensor is read."""
    # Read last, as each is compared with what the other tensors have filled.
    ties = {name: placing for name, placing in placed.items() if isinstance(placing[0], Tied)}
    tied = {p for place, groups in ties.values() for p in place.paths(groups)}
    waiting = Counter(p for name in placed.keys() - ties for p in _paths(placed[name]))
    host: dict[str, np.ndarray] = {}
    done: dict[str, Any] = {}
    for name in [name for name in placed if name not in ties]:
        place, groups = placed[name]
        paths = place.paths(groups)
        for p in paths:
            if p not in host:
                leaf = leaves.by_path[p]
                host[p] = np.empty(leaf.shape, leaf.dtype)
        place.give(host, groups, tensors.read(name))
        for p in paths:
            waiting[p] -= 1
            if not waiting[p] and p not in tied:
                done[p] = like_leaf(host.pop(p), leaves.by_path[p])
    for name, (place, groups) in ties.items():
        kept = place.take(host, groups)
        if not np.array_equal(tensors.read(name).astype(kept.dtype), kept):
            raise DataError(
                f"{path}: {name} differs from the tensor of {place.paths(groups)[0]}, to which the "
                "model ties it; provide weights that were trained this way"
            )
    return done | {p: like_leaf(array, leaves.by_path[p]) for p, array in host.items()}


def _paths(placed: PlacedTensor) -> list[str]:
    place, groups = placed
    return place.paths(groups)


def _say(
    path: Path,
    table: RenameTable,
    placed: dict[str, PlacedTensor],
    leaves: ModelLeaves,
    tensors: Tensors,
) -> None:
    filled = {p for each in placed.values() for p in _paths(each)}
    count = counted(len(filled), "leaf").replace("leafs", "leaves")
    text = f"{path}: {counted(len(placed), 'tensor')} fill {count} of the model"
    conversions = Counter(
        f"{tensors.kinds[name].dtype} to {leaves.by_path[p].dtype}"
        for name, each in placed.items()
        for p in _paths(each)
        if tensors.kinds[name].dtype != leaves.by_path[p].dtype
    )
    text += "".join(f"; {number:,} from {each}" for each, number in conversions.items())
    if ignored := [name for name in tensors.kinds if name not in placed]:
        text += f"; left out: {named(ignored, _SHOWN)}"
    if kept := [p for p in leaves.weights if table.skips(p) and p not in filled]:
        text += f"; not loaded: {named(kept, _SHOWN)}"
    print(*labelled("weight", text), sep="\n", flush=True)
