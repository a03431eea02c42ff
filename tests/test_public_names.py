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


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("fit", "batch_size: int | None = None"),
        ("Run", "hooks: Sequence[Hook] = ()"),
        ("DataParallel", "tuning: str | Path | None = None, job: Job | None = None"),
        ("layout", "schedule: Literal['1f1b', 'gpipe'] = '1f1b') -> Layout"),
        ("initialize", "patience: Timeouts | None = None"),
        ("verify", "show: Callable[[str], None] | None = None"),
    ],
)
def test_help_shows_signatures_as_they_are_written(call: str, shown: str) -> None:
    assert shown in str(inspect.signature(PUBLIC[call]))


def test_no_signature_has_ranges() -> None:
    texts = {name: str(inspect.signature(each)) for name, each in PUBLIC.items() if is_ours(each)}
    assert [name for name, text in texts.items() if "Annotated" in text] == []


def is_ours(value: Any) -> bool:
    """Whether Python knows its arguments, as it does not know those of an exception."""
    return callable(value) and not (inspect.isclass(value) and issubclass(value, BaseException))


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
