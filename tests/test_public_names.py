"""`replicax.__all__` is the public API: sorted, complete, and documented."""

import __future__

import inspect
from types import ModuleType

import pytest

import replicax


def test_all_is_sorted() -> None:
    assert list(replicax.__all__) == sorted(replicax.__all__)


def test_all_is_complete() -> None:
    public = {
        name
        for name, value in vars(replicax).items()
        if not name.startswith("_") and not isinstance(value, ModuleType | __future__._Feature)
    }
    assert public == {name for name in replicax.__all__ if not name.startswith("_")}


@pytest.mark.parametrize("name", replicax.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = getattr(replicax, name)
    if name.startswith("__"):  # __version__ and the like: text, not an object to describe
        return
    doc = value.__doc__ or ""
    generated = doc.startswith(f"{name}(")  # the default docstring of a dataclass
    assert doc.strip(), f"replicax.{name} has no docstring"
    assert not generated, f"replicax.{name} has only the docstring that dataclass makes"


@pytest.mark.parametrize(
    "name", [name for name in replicax.__all__ if inspect.isclass(getattr(replicax, name))]
)
def test_every_public_method_has_a_docstring(name: str) -> None:
    own = getattr(replicax, name)
    methods = [
        method
        for method, value in vars(own).items()
        if not method.startswith("_") and (callable(value) or isinstance(value, property))
    ]
    undocumented = [method for method in methods if not inspect.getdoc(getattr(own, method))]
    assert not undocumented, f"replicax.{name} has methods without a docstring: {undocumented}"
