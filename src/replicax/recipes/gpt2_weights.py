"""Published GPT-2 weights (a .safetensors file) -> the parameters of the network."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import ConfigError, DataError, require
from replicax.recipes.transformer import Params, Shape, init

# What some exports hold beside the parameters: the causal mask, and the output's copy of `wte`.
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_OUTPUT = "lm_head.weight"
_EMBEDDING = "wte.weight"
_PREFIX = "transformer."
_LAYER = re.compile(r"h\.(\d+)\.")
# Those that float32 holds exactly.
_DTYPES = ("F32", "F16", "BF16")


def load_weights(path: Path, shape: Shape) -> Params:
    """The parameters in `path`, float32, in the tree of `transformer.init`.

    The names are those of the published file: `wte.weight`, `h.0.attn.c_attn.weight`, ..., with or
    without `transformer.` before them.

    Raises:
        ConfigError: no such file.
        DataError: it is no .safetensors file; a tensor is missing, unknown, of another shape than
            the network's or of another dtype than float32, float16 and bfloat16; or the output's
            weights are not the embedding's.
        MissingDependencyError: safetensors is not installed.
    """
    safetensors = require("safetensors", "text")
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the path of a .safetensors file")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return _parameters(path, file, shape)
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} is no .safetensors file ({error}); convert it to one") from error


def save_weights(params: Params, path: Path) -> None:
    """Write `params` to `path` under the published names, in float32."""
    numpy_format = require("safetensors.numpy", "text")
    numpy_format.save_file(published(params), path)


def published(params: Params) -> dict[str, np.ndarray]:
    """`params` under the published names, in float32."""
    tensors: dict[str, np.ndarray] = {}
    for path_of_array, array in jax.tree.leaves_with_path(params):
        host = np.ascontiguousarray(array, np.float32)  # of other arrays it writes the wrong order
        if _is_stacked(path_of_array):
            layers = list(host.reshape(len(host), *_published_shape(path_of_array, host.shape)))
        else:
            layers = [host]
        tensors |= dict(zip(_published_names(path_of_array, len(layers)), layers, strict=True))
    return tensors


def _parameters(path: Path, file: Any, shape: Shape) -> Params:
    stored = {name.removeprefix(_PREFIX): name for name in file.keys()}  # noqa: SIM118
    stored = {name: key for name, key in stored.items() if not _BUFFER.fullmatch(name)}
    output = stored.pop(_OUTPUT, None)
    headers = {name: file.get_slice(key) for name, key in stored.items()}
    wrong = {name: each.get_dtype() for name, each in headers.items()}
    wrong = {name: dtype for name, dtype in wrong.items() if dtype not in _DTYPES}
    _check(path, {name: tuple(each.get_shape()) for name, each in headers.items()}, shape)
    _refuse(
        path,
        [f"{name} is {dtype}" for name, dtype in wrong.items()],
        f"weights are {', '.join(_DTYPES)}: convert them",
    )

    def tensor(name: str) -> np.ndarray:
        array: np.ndarray = file.get_tensor(stored[name])
        return array

    if output is not None and not np.array_equal(file.get_tensor(output), tensor(_EMBEDDING)):
        raise DataError(
            f"{path}: {_OUTPUT} differs from {_EMBEDDING}; this network's output is its embedding: "
            "give weights that were trained so"
        )

    def parameter(path_of_array: tuple[Any, ...], wanted: Any) -> jax.Array:
        layers = [tensor(name) for name in _published_names(path_of_array, shape.layers)]
        host = np.stack(layers) if _is_stacked(path_of_array) else layers[0]
        return jnp.asarray(host.reshape(wanted.shape), jnp.float32)

    params: Params = jax.tree.map_with_path(parameter, _abstract(shape))
    return params


def _check(path: Path, found: Mapping[str, tuple[int, ...]], shape: Shape) -> None:
    """Refuse other names and shapes than the network's."""
    wanted = _names(shape)
    layers = {match[1] for name in found if (match := _LAYER.match(name))}
    fits = (
        f"the file has {len(layers)} layers and this network {shape.layers}: give a file of this "
        "network, or its size (--preset, --layers)"
    )
    _refuse(path, [f"{name} is missing" for name in wanted if name not in found], fits)
    _refuse(path, [f"{name} is not of this network" for name in found if name not in wanted], fits)
    misshapen = [
        f"{name} is {list(found[name])}, and this network's {list(dims)}"
        for name, dims in wanted.items()
        if found[name] != dims
    ]
    sizes = "--preset, --width, --context, --vocab-size"
    _refuse(path, misshapen, f"choose the network's sizes after the file ({sizes})")


def _refuse(path: Path, faults: Sequence[str], rule: str) -> None:
    if faults:
        others = f" (and {len(faults) - 1:,} more such tensors)" if len(faults) > 1 else ""
        raise DataError(f"{path}: {faults[0]}{others}; {rule}")


def _names(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The published name and shape of every tensor of the network."""
    return {
        name: _published_shape(path, array.shape)
        for path, array in jax.tree.leaves_with_path(_abstract(shape))
        for name in _published_names(path, shape.layers)
    }


def _published_names(path: tuple[Any, ...], layers: int) -> list[str]:
    """The name of the array at `path`, or those of its layers where they are stacked."""
    first, *rest = (entry.key for entry in path)
    if not _is_stacked(path):
        return [".".join((first, *rest))]
    return [".".join((first, str(layer), *rest)) for layer in range(layers)]


def _published_shape(path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The published shape of the array at `path`, or of each of its layers."""
    if not _is_stacked(path):
        return shape
    _, *dims = shape
    if path[-2].key != "c_attn":
        return tuple(dims)
    *inputs, three, width = dims  # query, key and value side by side
    return (*inputs, three * width)


def _is_stacked(path: tuple[Any, ...]) -> bool:
    return bool(path[0].key == "h")


def _abstract(shape: Shape) -> Params:
    params: Params = jax.eval_shape(lambda: init(shape, jax.random.key(0)))
    return params
