"""Files of tensors, read one by one: safetensors, torch's, in shards too, and Orbax's folders."""

import contextlib
import dataclasses
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path, PurePath
from typing import Any

import jax
import msgspec
import numpy as np

from replicax.errors import ConfigError, DataError, require, require_package

_IN_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""Files of a folder that transformers saved, the first of which is read."""
_OF_TORCH = (".bin", ".pt", ".pth")
_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_NARROW = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
FILE_DTYPES = _DTYPES | _NARROW
"""NumPy's dtypes, and those of JAX, by the names that safetensors files have for them."""
_LFS = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of an open file, each read when it is asked for."""

    kinds: dict[str, jax.ShapeDtypeStruct]
    """Shapes and dtypes by name, in the file's order."""
    read: Callable[[str], np.ndarray]
    optional: Set[str] = frozenset()
    """Names that a model may lack: a run's random streams and counters."""


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Tensors]:
    """Open a file of tensors, an index of such files, or a folder of them.

    Raises:
        ConfigError: no such file.
        DataError: not such a file.
        MissingDependencyError: the package that reads it is not installed.
    """
    if path.is_dir():
        names = [name for name in _IN_FOLDER if (path / name).is_file()]
        if not names:
            yield _of_orbax(path)
            return
        path = path / names[0]
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; provide a .safetensors, .pt, .pth or .bin file")
    with contextlib.ExitStack() as stack:
        if path.suffix == ".json":
            files = sorted(set(_index(path).values()))
            yield _joined([_opened(path.parent / file, stack) for file in files])
        else:
            yield _opened(path, stack)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _index(path: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.convert(json.loads(path.read_text()), _Index).weight_map
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} has no weight_map; the index of a model in several files names the file of "
            "each tensor: pass such an index, or a .safetensors file"
        ) from error
    for name in weight_map.values():
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise DataError(
                f"{path} names {name!r}, a file outside of its folder: move the file there"
            )
    return weight_map


def _opened(path: Path, stack: contextlib.ExitStack) -> Tensors:
    if not path.is_file():  # also a pipe, whose writer may never come
        raise DataError(f"{path} is not a file; provide all files that the index names")
    if path.suffix in _OF_TORCH:
        return _of_torch(path)
    safetensors = require("safetensors", "text")
    try:
        file = stack.enter_context(safetensors.safe_open(path, "np"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        with path.open("rb") as opened:
            pointer = opened.read(len(_LFS)) == _LFS
        if pointer:
            raise DataError(
                f"{path} is a pointer of Git LFS in place of the file: run git lfs pull"
            ) from error
        raise DataError(f"{path} is not a .safetensors file ({error}); convert it") from error
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    if odd := [name for name, each in slices.items() if each.get_dtype() not in FILE_DTYPES]:
        raise DataError(
            f"{path}: {odd[0]} is {slices[odd[0]].get_dtype()}, which cannot be read here; "
            f"dtypes are {', '.join(FILE_DTYPES)}: convert it"
        )
    kinds = {
        name: jax.ShapeDtypeStruct(tuple(each.get_shape()), np.dtype(FILE_DTYPES[each.get_dtype()]))
        for name, each in slices.items()
    }

    def read(name: str) -> np.ndarray:
        narrow = slices[name].get_dtype() in _NARROW
        array: np.ndarray = _bytes(path, name, kinds[name]) if narrow else file.get_tensor(name)
        return array

    return Tensors(kinds, read)


def _bytes(path: Path, name: str, kind: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return a tensor of an open file, whose header is known to be right, from its bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + begin)
        return np.frombuffer(file.read(end - begin), kind.dtype).reshape(kind.shape)


def _of_torch(path: Path) -> Tensors:
    """Return the tensors in a state_dict, or in dicts of them, whose names are joined by dots."""
    torch = require_package("torch", f"reads {path}")
    try:
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # the library has no narrower exception
        said = " ".join(str(error).split())[:160]
        raise DataError(
            f"{path} is not a file of tensors that torch saved ({said}); save the model's "
            "state_dict()"
        ) from error
    tensors = {name: each.detach() for name, each in _flat(loaded) if torch.is_tensor(each)}
    kinds = {
        name: jax.ShapeDtypeStruct(
            tuple(each.shape), np.dtype(str(each.dtype).removeprefix("torch."))
        )
        for name, each in tensors.items()
    }

    def read(name: str) -> np.ndarray:
        # NumPy has no array of torch's bfloat16, but of its bytes.
        flat = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        array: np.ndarray = flat.view(kinds[name].dtype).reshape(kinds[name].shape)
        return array

    return Tensors(kinds, read)


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        yield f"{prefix}{name}", value
        yield from _flat(value, f"{prefix}{name}.")


def _joined(files: list[Tensors]) -> Tensors:
    file_of = {name: file for file in files for name in file.kinds}
    kinds = {name: file.kinds[name] for name, file in file_of.items()}
    return Tensors(kinds, lambda name: file_of[name].read(name))


def _of_orbax(path: Path) -> Tensors:
    from replicax.train.checkpoints.orbax_folder import read_parts

    weights, others = read_parts(path)
    arrays = weights | others
    kinds = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in arrays.items()}
    return Tensors(kinds, arrays.__getitem__, others.keys())
