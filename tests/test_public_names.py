"""`replicax.__all__` is the public API: what `dir` lists, and documented."""

import inspect
from types import ModuleType
from typing import Any, get_args

import pytest
from support.public_names import MODULES, PUBLIC

import replicax
from replicax.bench.layouts import AXES, AxisName
from replicax.core.ground.codecs import CODECS, CodecName, ReductionName
from replicax.core.modes.mode_table import MODES, ModeName
from replicax.core.placement.layout import LAYOUTS, LayoutName
from replicax.core.placement.pipeline_schedules import SCHEDULES, ScheduleName
from replicax.core.step.reduction import REDUCTIONS


def test_dir_and_a_star_import_list_the_public_names_alone() -> None:
    taken: dict[str, Any] = {}
    exec("from replicax import *", taken)
    assert dir(replicax) == replicax.__all__ == sorted(taken.keys() - {"__builtins__"})
    modules = {name for name in replicax.__all__ if isinstance(taken[name], ModuleType)}
    assert modules == MODULES
    assert len(replicax.__all__) <= 45


@pytest.mark.parametrize(
    ("literal", "table"),
    [
        (AxisName, AXES),
        (CodecName, CODECS),
        (LayoutName, LAYOUTS),
        (ModeName, MODES),
        (ReductionName, REDUCTIONS),
        (ScheduleName, SCHEDULES),
    ],
    ids=lambda value: "",
)
def test_type_checkers_know_the_names_of_each_table(literal: Any, table: Any) -> None:
    assert get_args(literal) == (*table,)


def test_a_name_that_is_elsewhere_is_told() -> None:
    with pytest.raises(AttributeError, match=r"rx\.hooks\.CSV"):
        _ = replicax.CSV


@pytest.mark.parametrize("name", [*PUBLIC, *sorted(MODULES)])
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = PUBLIC[name] if name in PUBLIC else getattr(replicax, name)
    doc = value.__doc__ or ""
    generated = doc.startswith(f"{name}(")  # the default docstring of a dataclass
    assert doc.strip(), f"replicax.{name} has no docstring"
    assert not generated, f"replicax.{name} has only the docstring that dataclass makes"


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isclass(value)])
def test_every_public_method_has_a_docstring(name: str) -> None:
    own = PUBLIC[name]
    methods = [
        method
        for method, value in vars(own).items()
        if not method.startswith("_") and (callable(value) or isinstance(value, property))
    ]
    undocumented = [method for method in methods if not inspect.getdoc(getattr(own, method))]
    assert not undocumented, f"replicax.{name} has methods without a docstring: {undocumented}"
