"""Load a user's Python file as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from replicax.errors import ConfigError, did_you_mean


def from_file(spec: str, wanted: str, modules: dict[Path, ModuleType]) -> Any:
    """Return what `FILE.py:name` refers to; its file is run once, and is then one of `modules`.

    Raises:
        ConfigError: no such file or name; `wanted` says what it is, as in "a step".
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where.endswith(".py"):
        raise ConfigError(f"{spec!r} does not name {wanted}; write FILE.py:name")
    path = Path(where)
    if path.resolve() not in modules:
        modules[path.resolve()] = load_file(path, f"{wanted} as FILE.py:name")
    module = modules[path.resolve()]
    if not hasattr(module, name):
        own = [each for each in vars(module) if not each.startswith("_")]
        raise ConfigError(
            f"{where} has no {name!r}{did_you_mean(name, own)}; use a name that it defines"
        )
    return getattr(module, name)


def load_file(path: Path, wanted: str) -> ModuleType:
    """Run a Python file and return it as a module. It can import modules from its folder.

    Args:
        path: the file.
        wanted: the expected kind of path, for the error: "a recipe as file.py:Name".

    Raises:
        ConfigError: no such file, or not a Python file.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give the path of {wanted}")
    name = f"replicax_file_{path.stem}"  # a file named json.py must not replace json
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python; rename it to end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # for imports from its folder, as with python file.py
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module
