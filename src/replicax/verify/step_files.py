"""A step and its reference from files: `FILE.py:name`."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from replicax.errors import ConfigError, did_you_mean
from replicax.verify.check import Verification
from replicax.verify.step import verify_step


def verify_files(
    step: str, reference: str, *, state: str = "state", batch: str = "batch", **options: Any
) -> Verification:
    """`verify_step` on what two files define; they may be one file.

    Beside the step and its reference they define a state and a global batch: values, or functions
    without arguments that make them. A `key` is taken where there is one.

    Args:
        step: `FILE.py:name`, the step as the training loop calls it.
        reference: `FILE.py:name`, the same for one device.
        state: the name of the state, looked up in the step's file and then in the reference's.
        batch: the name of the batch, looked up likewise.
        options: as `verify_step` takes them.

    Raises:
        ConfigError: a file or a name that is not there, or what `verify_step` raises.
    """
    stepper, step_module = load(step)
    single, reference_module = load(reference)
    for spec, function in ((step, stepper), (reference, single)):
        if not callable(function):
            raise ConfigError(
                f"{spec} is a {type(function).__name__}; a step is a function: name the function"
            )
    modules = {step.rpartition(":")[0]: step_module, reference.rpartition(":")[0]: reference_module}
    key = _made("key", modules, optional=True)
    return verify_step(
        stepper,
        single,
        _made(state, modules),
        _made(batch, modules),
        **({"key": key} if _is_key(key) else {}),
        **options,
    )


def load(spec: str) -> tuple[Any, ModuleType]:
    """What `FILE.py:name` means, and the file as a module.

    Raises:
        ConfigError: no such file, or the name is not in it.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where.endswith(".py"):
        raise ConfigError(f"{spec!r} names no function; write FILE.py:name")
    module = _module(Path(where))
    if not hasattr(module, name):
        own = [each for each in vars(module) if not each.startswith("_")]
        raise ConfigError(
            f"{where} has no {name!r}{did_you_mean(name, own)}; name a function that it defines"
        )
    return getattr(module, name), module


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the path of a step as FILE.py:name")
    name = f"replicax_step_{path.stem}"  # a file named json.py must not replace json
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known  # step and reference share what the file makes
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python; rename it to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the file's neighbours, as python file.py has them
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _made(name: str, modules: Mapping[str, ModuleType], *, optional: bool = False) -> Any:
    """The value of a name, or what the function of that name returns."""
    for module in modules.values():
        if hasattr(module, name):
            value = getattr(module, name)
            return value() if callable(value) else value
    if optional:
        return None
    raise ConfigError(
        f"{' and '.join(modules)} define no {name!r}; a step is run on it: define a value or "
        "a function without arguments, or say what it is called"
    )


def _is_key(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray))
