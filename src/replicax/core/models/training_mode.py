"""Training and inference mode of NNX and Equinox models, as these libraries set it."""

import sys
from collections.abc import Mapping
from typing import Any

import jax

from replicax.core.ground.leaves import PyTree
from replicax.errors import ConfigError

_NNX_MODES = ("deterministic", "use_running_average")
"""The attributes that `nnx.Module.train` and `eval` set."""


def for_training(model: Any) -> Any:
    """Return a copy of a model with all its parts in training mode; other models as they are.

    Raises:
        ConfigError: some parts were in inference mode and others were not.
    """
    # No model can come from a library that was never imported.
    if isinstance(model, getattr(sys.modules.get("flax.nnx"), "Module", ())):
        from flax import nnx

        model = nnx.merge(*nnx.split(model))
        before = _nnx_modes(model)
        type(model).train(model)  # a model may have an attribute of that name
        _check(before, _nnx_modes(model))
    elif "equinox" in sys.modules and (before := _equinox_modes(model)):
        model = sys.modules["equinox"].nn.inference_mode(model, value=False)
        _check(before, _equinox_modes(model))
    return model


def for_inference(model: PyTree) -> PyTree:
    """Return a model, or a state, with its modules in inference mode; it may be changed."""
    if "flax.nnx" in sys.modules:
        module = sys.modules["flax.nnx"].Module

        def evaluates(node: Any) -> bool:
            if isinstance(node, module):
                node.eval()
                return True
            return False

        jax.tree.leaves(model, is_leaf=evaluates)
    if "equinox" in sys.modules:
        model = sys.modules["equinox"].nn.inference_mode(model)
    return model


def _nnx_modes(model: Any) -> dict[str, Any]:
    from flax import nnx

    return {
        ".".join(map(str, (*path, name))): getattr(module, name)
        for path, module in nnx.iter_modules(model)
        for name in _NNX_MODES
        if hasattr(module, name)
    }


def _equinox_modes(model: PyTree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(model)
        if path and getattr(path[-1], "name", None) == "inference"
    }


def _check(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if training mode was set in some parts and others had it already."""
    changed = [path for path, mode in before.items() if mode is True and after[path] is not True]
    others = [path for path, mode in before.items() if mode is not True]
    if changed and others:
        raise ConfigError(
            f"the model's {changed[0]} is True and its {others[0]} is {before[others[0]]}; a step "
            "sets training mode in the whole model: set it before init (NNX: model.train()), and "
            "inference mode of a part in the loss (NNX: model.part.eval())"
        )
