"""Load a step and its reference from files: `FILE.py:name`."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from replicax.errors import ConfigError
from replicax.text.python_file import from_file
from replicax.verify.form import StepFile
from replicax.verify.step import verify_step
from replicax.verify.verification import Verification


def verify_files(
    step: str, reference: str, *, state: str = "state", batch: str = "batch", **options: Any
) -> Verification:
    """Run `verify_step` on functions from two files, or from one.

    Besides the step and its reference, the files define a state and a global batch: values, or
    functions without arguments that return them. A `key` is used if defined.

    `state` and `batch` are their names, looked up in the step's file and then in the reference's.

    Raises:
        ConfigError: a file or a name does not exist, or `verify_step` raises one.
    """
    modules: dict[Path, ModuleType] = {}
    stepper, single = (_function(spec, modules) for spec in (step, reference))
    key = _made("key", modules, optional=True)
    if isinstance(key, (jax.Array, np.ndarray)):
        options["key"] = key
    return verify_step(stepper, single, _made(state, modules), _made(batch, modules), **options)


def _function(spec: str, modules: dict[Path, ModuleType]) -> StepFile:
    """Return the function that `FILE.py:name` refers to, loading its file into `modules` once.

    A step and its reference in one file thus share module state.
    """
    function: StepFile = from_file(spec, "a step", modules)
    if not callable(function):
        raise ConfigError(
            f"{spec} is a {type(function).__name__}; a step must be a function: name the function"
        )
    return function


def _made(name: str, modules: Mapping[Path, ModuleType], *, optional: bool = False) -> Any:
    """Return the value of a name, or the result of the function of that name."""
    for module in modules.values():
        if hasattr(module, name):
            value = getattr(module, name)
            return value() if callable(value) else value
    if optional:
        return None
    files = " and ".join(path.name for path in modules)
    raise ConfigError(
        f"{files} define no {name!r}, which the step needs: define it as a value or a function "
        "without arguments, or pass the name it has"
    )
