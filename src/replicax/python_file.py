"""A user's Python file as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from replicax.errors import ConfigError


def load_file(path: Path, wanted: str) -> ModuleType:
    """Run a Python file, as it is now, and return it as a module. It can import its neighbours.

    Args:
        path: the file.
        wanted: what it is to name and how, for the error: "a recipe as file.py:Name".

    Raises:
        ConfigError: no such file, or not one of Python.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the path of {wanted}")
    name = f"replicax_file_{path.stem}"  # a file named json.py must not replace json
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python; rename it to end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the file's neighbours, as python file.py has them
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module
