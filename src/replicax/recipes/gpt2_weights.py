"""Convert published GPT-2 weights (a .safetensors file) to the network's parameters."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import ConfigError, DataError, require
from replicax.recipes.transformer import Params, Shape, init

# Extra tensors in some exports: the causal mask, and the output's copy of `wte`.
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_OUTPUT = "lm_head.weight"
_EMBEDDING = "wte.weight"
_LAYER = re.compile(r"h\.(\d+)\.")
# The dtypes that float32 represents exactly.
_DTYPES = ("F32", "F16", "BF16")


def published(params: Params) -> dict[str, np.ndarray]:
    """Return `params` under the published names, as contiguous float32 for .safetensors."""
    return _tensors(jax.tree.map(lambda array: np.ascontiguousarray(array, np.float32), params))


def load_weights(path: Path, shape: Shape) -> Params:
    """Load the parameters in `path` as float32, in the tree structure of `transformer.init`.

    The names are those of the published file: `wte.weight`, `h.0.attn.c_attn.weight`, ..., with or
    without the prefix `transformer.`.

    Raises:
        ConfigError: no such file.
        DataError: not a .safetensors file; a tensor is missing, unknown, does not match the
            network's shape, or is not float32, float16 or bfloat16; or the output weights differ
            from the embedding.
        MissingDependencyError: safetensors is not installed.
    """
    safetensors = require("safetensors", "text")
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; provide the path of a .safetensors file")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return _parameters(path, file, shape)
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a .safetensors file ({error}); convert it") from error


def _parameters(path: Path, file: Any, shape: Shape) -> Params:
    stored = {name.removeprefix("transformer."): name for name in file.keys()}  # noqa: SIM118
    stored = {name: key for name, key in stored.items() if not _BUFFER.fullmatch(name)}
    output = stored.pop(_OUTPUT, None)
    abstract: Params = jax.eval_shape(lambda: init(shape, jax.random.key(0)))
    _check(path, {name: file.get_slice(key) for name, key in stored.items()}, shape, abstract)
    if output is not None:
        embedding = file.get_tensor(stored[_EMBEDDING])
        if not np.array_equal(file.get_tensor(output), embedding):
            raise DataError(
                f"{path}: {_OUTPUT} differs from {_EMBEDDING}; this network ties its output to "
                "its embedding: provide weights that were trained this way"
            )

    def parameter(place: tuple[Any, ...], wanted: Any) -> jax.Array:
        layers = [file.get_tensor(stored[name]) for name in _names(place, shape.layers)]
        return jnp.asarray(np.stack(layers).reshape(wanted.shape), jnp.float32)

    params: Params = jax.tree.map_with_path(parameter, abstract)
    return params


def _check(path: Path, found: dict[str, Any], shape: Shape, abstract: Params) -> None:
    """Raise unless names, shapes and dtypes match the network's."""

    def refuse(faults: Sequence[str], rule: str) -> None:
        if faults:
            others = f" (and {len(faults) - 1:,} more such tensors)" if len(faults) > 1 else ""
            raise DataError(f"{path}: {faults[0]}{others}; {rule}")

    wanted = jax.eval_shape(_tensors, abstract)
    layers = {match[1] for name in found if (match := _LAYER.match(name))}
    fits = (
        f"the file has {len(layers)} layers and this network {shape.layers}: provide a file for "
        "this network, or match its size (--preset, --layers)"
    )
    refuse([f"{name} is missing" for name in wanted if name not in found], fits)
    refuse([f"{name} is not part of this network" for name in found if name not in wanted], fits)
    dims = {name: (found[name].get_shape(), list(each.shape)) for name, each in wanted.items()}
    refuse(
        [f"{name} is {a}, but this network's is {b}" for name, (a, b) in dims.items() if a != b],
        "set the network's sizes to the file's (--preset, --width, --context, --vocab-size)",
    )
    dtypes = {name: each.get_dtype() for name, each in found.items()}
    refuse(
        [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in _DTYPES],
        f"weights must be {', '.join(_DTYPES)}: convert them",
    )


def _tensors(params: Params) -> dict[str, Any]:
    """Return arrays under their published names, per layer, with c_attn `[width, 3 * width]`.

    Also traced, to obtain the shapes.
    """
    tensors: dict[str, Any] = {}
    for place, array in jax.tree.leaves_with_path(params):
        keys = [entry.key for entry in place]
        if "c_attn" in keys:  # query, key and value side by side
            array = array.reshape(*array.shape[:-2], -1)
        layers = array if keys[0] == "h" else array[None]
        tensors |= zip(_names(place, len(layers)), layers, strict=True)
    return tensors


def _names(place: tuple[Any, ...], layers: int) -> list[str]:
    """Return the published name of the array at `place`, or one name per layer if stacked."""
    first, *rest = (entry.key for entry in place)
    stacks = [[first, str(layer)] for layer in range(layers)] if first == "h" else [[first]]
    return [".".join([*stack, *rest]) for stack in stacks]
