"""`check_source`: files it takes and refuses, and how it says what it found."""

import itertools
import json
from pathlib import Path

import pytest

from replicax.errors import ConfigError
from replicax.verify.source import check_source, examine, findings_lines, to_json

FORGOTTEN = """\
from functools import partial

import jax


@partial(jax.pmap, axis_name="i")
def step(state, batch):
    grads = jax.grad(loss)(state.params, batch)
    return state.apply_gradients(grads=grads)
"""
LOSS = "\n\ndef loss(params, batch):\n    return ((batch @ params) ** 2).mean()\n"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    path.write_text(FORGOTTEN)
    return path


def test_a_finding_says_where_and_what_and_how_to_mend_it(path: Path) -> None:
    (finding,) = check_source(path)
    assert (finding.line, finding.column, finding.rule) == (9, 12, "no-reduction")
    assert finding.severity == "error"
    assert finding.code == "    return state.apply_gradients(grads=grads)"
    assert "drift apart" in finding.reason
    assert "pmean" in finding.fix


def test_the_lines_fit_and_mark_the_place(path: Path) -> None:
    lines = findings_lines(examine(path), 80)
    assert max(map(len, lines)) <= 80
    assert lines[0] == "error[no-reduction]"
    place = next(number for number, line in enumerate(lines) if line.startswith("9 | "))
    code, marks = lines[place : place + 2]
    start, end = marks.index("^"), marks.rindex("^") + 1
    assert code[start:end] == "state.apply_gradients(grads=grads)"
    assert lines[-1].startswith("1 error in")


@pytest.mark.parametrize("width", [50, 80, 120])
def test_long_and_indented_lines_are_cut_around_the_mark(path: Path, width: int) -> None:
    long = "    return " + "(" * 60 + "state.apply_gradients(grads=grads)" + ")" * 60
    path.write_text(FORGOTTEN.replace("    return state.apply_gradients(grads=grads)", long))
    lines = findings_lines(examine(path), width)
    assert max(map(len, lines)) <= width
    code, marks = next(
        (line, after) for line, after in itertools.pairwise(lines) if line.startswith("9 | ")
    )
    assert code[marks.index("^") :].startswith("state.apply")


def test_json_holds_the_same(path: Path) -> None:
    found = json.loads(json.dumps(to_json(examine(path))))
    assert found["fails"] is True
    assert found["complete"] is True
    assert found["parallel_functions"] == 1
    assert [(one["line"], one["rule"]) for one in found["findings"]] == [(9, "no-reduction")]


def test_notes_do_not_fail(path: Path) -> None:
    path.write_text("from jax.experimental.shard_map import shard_map\n")
    examination = examine(path)
    assert [one.severity for one in examination.findings] == ["note"]
    assert not examination.fails


def test_a_file_without_parallel_code_has_nothing_to_check(path: Path) -> None:
    path.write_text("import jax\n\nstep = jax.jit(lambda x: x)\n")
    (line,) = [" ".join(findings_lines(examine(path), 400))]
    assert line == f"nothing to check: no pmap, shard_map or jit over a mesh in {path}"


def test_a_file_without_error_says_how_much_was_read(path: Path) -> None:
    fixed = FORGOTTEN.replace("grads=grads", 'grads=jax.lax.pmean(grads, "i")') + LOSS
    path.write_text(fixed)
    assert findings_lines(examine(path), 400) == [
        f"no error found in 1 parallel function of {path}"
    ]


@pytest.mark.parametrize(
    "comment", ["# replicax: ignore", "# on purpose.  replicax: ignore[other, no-reduction]"]
)
def test_a_comment_silences_its_line(path: Path, comment: str) -> None:
    path.write_text(FORGOTTEN.replace("grads=grads)", f"grads=grads)  {comment}"))
    assert check_source(path) == []


def test_a_comment_silences_only_its_rule(path: Path) -> None:
    comment = "  # replicax: ignore[shared-key]"
    path.write_text(FORGOTTEN.replace("grads=grads)", f"grads=grads){comment}"))
    assert [one.rule for one in check_source(path)] == ["no-reduction"]


def test_nothing_of_the_file_is_executed(path: Path) -> None:
    mark = path.resolve().with_name("executed")
    path.write_text(f"open({str(mark)!r}, 'w')\nimport a_module_that_nobody_has\n" + FORGOTTEN)
    assert len(check_source(path)) == 1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.py", None, "no such file"),
        ("notebook.ipynb", b"{}", "is a notebook"),
        ("broken.py", b"import jax\ndef f(:\n", "is not Python: line 2"),
        ("zero.py", b"a = 1\0", "is not Python"),
        ("latin.py", b"# \xff\xfe\n", "is not text"),
        ("", None, "is a folder"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        check_source(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_deep_and_recursive_code_ends(path: Path) -> None:
    calls = "\n".join(f"def f{n}(x):\n    return f{n + 1}(x) + f{n + 1}(x)" for n in range(40))
    path.write_text(f"{FORGOTTEN}\n{calls}\ndef f40(x):\n    return f0(x)\n")
    assert [one.line for one in check_source(path)] == [9]
    assert "the rest was not checked" in findings_lines(examine(path), 400)[-1]


def test_a_very_long_file_is_not_said_to_be_without_error(path: Path) -> None:
    path.write_text("x = 1 + 2\n" * 30_000 + FORGOTTEN)
    examination = examine(path)
    (line,) = findings_lines(examination, 400)
    assert line.startswith(f"no error found in 0 parallel functions of {path}; it takes too long")
    assert to_json(examination)["complete"] is False


@pytest.mark.slow
def test_the_repository_is_clean() -> None:
    root = Path(__file__).resolve().parents[2]
    files = sorted((root / "src").glob("**/*.py"))
    wrong = [(file.name, one.line, one.rule) for file in files for one in check_source(file)]
    assert wrong == []
