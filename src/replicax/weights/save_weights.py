"""`rx.save_weights`: a file of a model's weights, under the names of a table."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replicax.core.ground.leaves import whole_on_host
from replicax.errors import ConfigError, DataError, require
from replicax.text.arguments import typed
from replicax.text.wording import named
from replicax.weights.model_leaves import leaves_of
from replicax.weights.rename_table import NoLeafError, PlacedTensor, Rename, RenameTable
from replicax.weights.tensor_files import FILE_DTYPES, open_tensors
from replicax.weights.tensor_slices import Tied, UnfitError

SUFFIX = ".safetensors"


@typed
def save_weights(
    model: Any,
    file: str | Path,
    *,
    rename: Rename | None = None,
    skip: Sequence[str] = (),
    like: str | Path | None = None,
) -> dict[str, np.ndarray]:
    r"""Write a model's weights as a .safetensors file, by the table that `load_weights` reads.

    Weights are parameters, and statistics such as BatchNorm's. What no rule names is written under
    its dotted path. An existing file is replaced, once the new one is complete.

    Examples:
        >>> net = {"out": {"kernel": jnp.zeros((4, 3)), "bias": jnp.ones(3)}}
        >>> rename = {"linear.weight": rx.weights.transposed("out.kernel")}
        >>> written = rx.save_weights(net, "model.safetensors", rename=rename)
        >>> {name: array.shape for name, array in written.items()}
        {'linear.weight': (3, 4), 'out.bias': (3,)}

    Args:
        model: a model of any kind that `dp.init` accepts, such as `dp.model(state)`.
        file: the file to write; a suffix, if it has one, is .safetensors.
        rename: as in `load_weights`; a pattern must be plain text outside of its groups `(...)`,
            unless `like` has the names. Of several rules for one leaf, the first is used.
        skip: patterns of names and paths to leave out on purpose.
        like: a file (as in `load_weights`) whose names and dtypes are used, to which numbers are
            rounded; tensors that `rename` and `skip` leave out are copied. A file that was loaded
            without `cast` is written back byte for byte.

    Returns:
        The written tensors by name, on the host.

    Raises:
        ConfigError: a leaf has no name or several, a pattern stands for several names, or the file
            has another suffix or cannot be written.
        DataError: a tensor of `like` does not fit the model, a leaf is in none, or has a dtype that
            such a file lacks.
        MissingDependencyError: safetensors is not installed.
    """
    path = Path(file)
    check_suffix(path)
    numpy_format = require("safetensors.numpy", "text")
    tensors = named_weights(model, rename or {}, skip, like)
    for name, array in tensors.items():
        if array.dtype.name not in FILE_DTYPES.values():
            raise DataError(
                f"{name} is {array.dtype}, which a .safetensors file cannot hold: cast it, or "
                "skip= it"
            )
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
            whole = Path(folder, path.name)
            numpy_format.save_file(tensors, whole, metadata={"format": "pt"})
            like_others = Path(folder, "new")
            like_others.touch()
            whole.chmod(like_others.stat().st_mode)  # safetensors lets only the owner read
            whole.replace(path)
    except (OSError, KeyError, require("safetensors", "text").SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written ({error}); choose another") from error
    return tensors


def check_suffix(path: Path) -> None:
    """Raise `ConfigError` if the name of a file to write is one of another format."""
    if path.suffix not in ("", SUFFIX):
        raise ConfigError(
            f"{path} would be a {SUFFIX} file under the name of another: write {path.stem}{SUFFIX}"
        )


def named_weights(
    model: Any, rename: Rename, skip: Sequence[str] = (), like: str | Path | None = None
) -> dict[str, np.ndarray]:
    """Return the tensors that `save_weights` writes."""
    table, leaves = RenameTable(rename, skip), leaves_of(model)
    host = {path: whole_on_host(leaf) for path, leaf in leaves.by_path.items()}
    if like is None:
        placed = table.names(host, leaves.weights)
        tensors = {name: place.take(host, groups) for name, (place, groups) in placed.items()}
    else:
        placed, tensors = _named_like(Path(like), table, host)
    written = Counter[str]()
    for place, groups in placed.values():
        if not isinstance(place, Tied):
            for path, size in zip(place.paths(groups), place.sizes(host, groups), strict=True):
                written[path] += size
    wrong = [p for p in leaves.weights if written[p] != host[p].size and not table.skips(p)]
    if wrong:
        raise DataError(
            f"{len(wrong):,} of the model's {len(leaves.weights):,} weights would not be written "
            f"once: {named(wrong, 3)}; give each one rule in rename=, or skip= it"
        )
    # The format ignores strides.
    return {name: np.asarray(each, order="C") for name, each in tensors.items()}


def _named_like(
    like: Path, table: RenameTable, host: dict[str, np.ndarray]
) -> tuple[dict[str, PlacedTensor], dict[str, np.ndarray]]:
    """Return the places of a file's tensors, and all of its tensors, with the model's numbers."""
    placed: dict[str, PlacedTensor] = {}
    tensors: dict[str, np.ndarray] = {}
    with open_tensors(like) as opened:
        for name, kind in opened.kinds.items():
            try:
                placing = table.placed(name, host)
                if placing is None:
                    tensors[name] = opened.read(name)
                    continue
                place, groups = placed[name] = placing
                tensors[name] = place.take(host, groups).astype(kind.dtype)
                if tensors[name].shape != kind.shape:
                    raise UnfitError(f"has {list(tensors[name].shape)}, not {list(kind.shape)}")
            except NoLeafError as error:
                raise DataError(
                    f"{like}: {name} has no leaf in the model ({error}); name it in rename=, or "
                    "skip= it"
                ) from error
            except UnfitError as error:
                raise DataError(
                    f"{like}: {name} does not fit, its leaf {error}; pass the file that the model "
                    "was loaded from"
                ) from error
    return placed, tensors
