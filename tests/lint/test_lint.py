"""`replicax.lint`: the files it takes and refuses, and its messages."""

import importlib.machinery
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE

from replicax.errors import ConfigError
from replicax.lint import lookup
from replicax.lint.files import examine_file, lint_summary, python_files

FORGOTTEN = """\
from functools import partial

import jax


@partial(jax.pmap, axis_name="i")
def step(state, batch):
    grads = jax.grad(loss)(state.params, batch)
    return state.apply_gradients(grads=grads)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    path.write_text(FORGOTTEN)
    return path


@pytest.fixture
def chex(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("chex")
    module.__spec__ = importlib.machinery.ModuleSpec("chex", None)
    monkeypatch.setitem(sys.modules, "chex", module)
    lookup._module.cache_clear()
    lookup._resolved.cache_clear()
    return module


def test_an_attribute_that_cannot_be_had_is_no_finding(path: Path, chex: types.ModuleType) -> None:
    class Point(type):
        @property
        def current(cls) -> None:
            raise ValueError("none is current")

    chex.Point = Point("Point", (), {})  # type: ignore[attr-defined]
    path.write_text("import chex\nchex.Point.current.add(1)\n")
    assert examine_file(path).findings == []


@pytest.mark.parametrize(
    ("doc", "names"),
    [
        ("__init__(self, mesh: Mesh, spec: object = None) -> None", ["mesh", "spec"]),
        ("__init__(self, mesh: Mesh, spec: object = <object at 0x7f>) -> None", None),
        ("Make one.", None),
    ],
)
def test_a_compiled_class_tells_its_arguments_by_its_docstring(
    doc: str, names: list[str] | None
) -> None:
    made = types.SimpleNamespace(__init__=types.SimpleNamespace(__doc__=doc))
    found = lookup._compiled_signature(made)
    assert (found and list(found.parameters)) == names


def test_notes_do_not_fail(path: Path, chex: types.ModuleType) -> None:
    chex.__getattr__ = deprecated  # type: ignore[method-assign]
    path.write_text("import chex\nchex.old_one\n")
    examination = examine_file(path)
    assert [(one.severity, one.line) for one in examination.findings] == [("note", 2)]
    assert "write new_one" in examination.findings[0].fix
    assert not examination.fails


def deprecated(name: str) -> Any:
    if name != "old_one":
        raise AttributeError(name)
    warnings.warn("write new_one", DeprecationWarning, stacklevel=2)


def test_a_library_that_is_not_there_is_not_looked_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_is_module", lambda name: name != "haiku")
    path.write_text("import haiku\nhaiku.no_such_thing\n")
    assert examine_file(path).findings == []
    assert re.search(r"not installed, .*: haiku$", lint_summary([examine_file(path)]))


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    from jax import soft_pmap\nexcept ImportError:\n    soft_pmap = None\n",
        "import jax\nmap_ = jax.tree_map if hasattr(jax, 'tree_map') else jax.tree.map\n",
        "import jax\nif jax.__version__ < '0.4':\n    jax.tree_multimap(abs, 1)\n",
    ],
    ids=["try", "hasattr", "version"],
)
def test_a_file_that_provides_for_other_versions_is_right(path: Path, code: str) -> None:
    path.write_text(code)
    assert examine_file(path).findings == []


def test_a_name_is_told_once_with_its_count(path: Path) -> None:
    path.write_text("import jax\n" + "jax.tree_map(abs, 1)\n" * 3)
    (finding,) = examine_file(path).findings
    assert finding.line == 2
    assert "(3 times" in finding.reason
    assert "jax.tree.map" in finding.fix


def test_folders_are_looked_through(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "b/__pycache__/d.py", ".venv/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    names = [each.relative_to(tmp_path).as_posix() for each in python_files([tmp_path])]
    assert names == ["a.py", "b/c.py"]
    assert python_files([tmp_path / "a.py", tmp_path])[0] == tmp_path / "a.py"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.py file"):
        python_files([tmp_path / "empty"])


@pytest.mark.parametrize(
    "comment", ["# replicax: ignore", "# on purpose.  replicax: ignore[other, no-reduction]"]
)
def test_a_comment_silences_its_line(path: Path, comment: str) -> None:
    path.write_text(FORGOTTEN.replace("grads=grads)", f"grads=grads)  {comment}"))
    assert examine_file(path).findings == []


def test_a_comment_silences_only_its_rule(path: Path) -> None:
    comment = "  # replicax: ignore[shared-key]"
    path.write_text(FORGOTTEN.replace("grads=grads)", f"grads=grads){comment}"))
    assert [one.rule for one in examine_file(path).findings] == ["no-reduction"]


@pytest.mark.promise("lint.finds-classic-errors")
def test_nothing_of_the_file_is_executed(path: Path) -> None:
    mark = path.resolve().with_name("executed")
    path.write_text(f"open({str(mark)!r}, 'w')\nimport a_module_that_nobody_has\n" + FORGOTTEN)
    assert len(examine_file(path).findings) == 1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.py", None, "no such file"),
        ("notebook.ipynb", b"{}", "is a notebook"),
        ("broken.py", b"import jax\ndef f(:\n", "is not Python: line 2"),
        ("zero.py", b"a = 1\0", "is not Python"),
        ("latin.py", b"# \xff\xfe\n", "is not text"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        examine_file(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_deep_code_is_one_line(path: Path) -> None:
    path.write_text("x = " + "-" * 50_000 + "1\n")
    with pytest.raises(ConfigError, match="split it") as caught:
        examine_file(path)
    assert "\n" not in str(caught.value)


def test_recursive_functions_end(path: Path) -> None:
    calls = "\n".join(f"def f{n}(x):\n    return f{n + 1}(x) + f{n + 1}(x)" for n in range(40))
    path.write_text(f"{FORGOTTEN}\n{calls}\ndef f40(x):\n    return f0(x)\n")
    assert [one.line for one in examine_file(path).findings] == [9]


@EXHAUSTIVE
def test_the_repository_is_clean() -> None:
    root = Path(__file__).resolve().parents[2]
    files = sorted((root / "src").glob("**/*.py"))
    wrong = [
        (file.name, one.line, one.rule) for file in files for one in examine_file(file).findings
    ]
    assert wrong == []
