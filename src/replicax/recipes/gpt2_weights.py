"""Published GPT-2 weights (a .safetensors file) -> the parameters of the network."""

import re
from collections.abc import Mapping
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
_PREFIX = "transformer."
_LAYER = re.compile(r"h\.\d+\.")


def load_weights(path: Path, shape: Shape) -> Params:
    """The parameters in `path`, float32, in the tree of `transformer.init`.

    The names are those of the published file: `wte.weight`, `h.0.attn.c_attn.weight`, ..., with or
    without `transformer.` before them.

    Raises:
        ConfigError: no such file.
        DataError: it is no .safetensors file, or a tensor is missing, unknown, or of another shape
            than the network's.
    """
    tensors = _read(path)
    wanted = _names(shape)
    _drop_output(path, tensors)
    _check(path, {name: each.shape for name, each in tensors.items()}, wanted)

    def parameter(path_of_array: tuple[Any, ...], array: Any) -> jax.Array:
        names = _published_names(path_of_array, shape.layers)
        host = [tensors[name].astype(np.float32) for name in names]
        return jnp.asarray(np.stack(host) if _is_stacked(path_of_array) else host[0])

    params: Params = jax.tree.map_with_path(parameter, _abstract(shape))
    return params


def save_weights(params: Params, path: Path) -> None:
    """Write `params` to `path` under the published names, in float32."""
    numpy_format = require("safetensors.numpy", "text")
    tensors: dict[str, np.ndarray] = {}
    for path_of_array, array in jax.tree.leaves_with_path(params):
        host = np.asarray(array, np.float32)
        layers = host if _is_stacked(path_of_array) else [host]
        tensors |= dict(zip(_published_names(path_of_array, len(layers)), layers, strict=True))
    numpy_format.save_file(tensors, path)


def _read(path: Path) -> dict[str, np.ndarray]:
    numpy_format = require("safetensors.numpy", "text")
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the path of a .safetensors file")
    try:
        tensors = numpy_format.load_file(path)
    except (numpy_format.SafetensorError, OSError) as error:
        raise DataError(f"{path} is no .safetensors file ({error}); convert it to one") from error
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if not _BUFFER.fullmatch(name)}


def _drop_output(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Take out the output's weights, which must be the embedding's."""
    output = tensors.pop(_OUTPUT, None)
    embedding = tensors.get("wte.weight")
    if output is None or embedding is None or np.array_equal(output, embedding):
        return
    raise DataError(
        f"{path}: {_OUTPUT} differs from wte.weight; this network's output is its embedding: "
        "give weights that were trained so"
    )


def _check(
    path: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    def refuse(kind: str, names: list[str], rule: str) -> None:
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise DataError(f"{path}: {kind} {names[0]}{more}; {rule}")

    layers = 1 + max((int(name.split(".")[1]) for name in found if _LAYER.match(name)), default=-1)
    fits = f"it has {layers} layers: give a file of this network, or its size (--preset, --layers)"
    refuse("lacks the tensor", [name for name in wanted if name not in found], fits)
    refuse("has an unknown tensor", [name for name in found if name not in wanted], fits)
    refuse(
        "misshapen tensor",
        [
            f"{name} is {list(found[name])}, and this network wants {list(dims)}"
            for name, dims in wanted.items()
            if found[name] != dims
        ],
        "choose the network's sizes after the file (--preset, --width, --context, --vocab-size)",
    )


def _names(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The published name and shape of every tensor of the network."""
    return {
        name: array.shape[1:] if _is_stacked(path) else array.shape
        for path, array in jax.tree.leaves_with_path(_abstract(shape))
        for name in _published_names(path, shape.layers)
    }


def _published_names(path: tuple[Any, ...], layers: int) -> list[str]:
    """The name of the array at `path`, or those of its layers where they are stacked."""
    first, *rest = (entry.key for entry in path)
    if not _is_stacked(path):
        return [".".join((first, *rest))]
    return [".".join((first, str(layer), *rest)) for layer in range(layers)]


def _is_stacked(path: tuple[Any, ...]) -> bool:
    return bool(path[0].key == "h")


def _abstract(shape: Shape) -> Params:
    params: Params = jax.eval_shape(lambda: init(shape, jax.random.key(0)))
    return params
