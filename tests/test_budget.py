"""The budget of `make test` and its like, the table of times, and the choice of tests."""

import json
import sys
from pathlib import Path

import pytest
from support import cost, times
from support.cost import TESTS
from support.figures import assert_mentions

SLOW = """
import time
import pytest

@pytest.mark.parametrize("number", range(20))
def test_slow(number):
    end = time.process_time() + 0.06
    while time.process_time() < end:
        pass
"""


OLDEST = {
    "date": "2026-11-29",
    "python": "3.11.7",
    "cases": 1,
    "seconds": 2,
    "wall_seconds": 1,
    "loop_ms": 25.0,
    "files": {"test_a.py": [1, 2.0, 1.0]},
}


def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "support.times"]
    code = cost.main(["test", "--", *command, f"--rootdir={folder}", str(folder)], folder)
    return code, capsys.readouterr().out.splitlines()


def test_twenty_slow_tests_are_above_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")  # a process that runs tests itself
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading them takes longer than all
    monkeypatch.setattr(cost, "loop_seconds", lambda: cost.LOOP_SECONDS)  # one would be noise
    for name in (times.FOLDER, "TEST_TIMES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "test_quick.py").write_text("def test_quick():\n    pass\n")
    (tmp_path / "durations.json").write_text('{"functions": {}, "pieces": {}}')
    (tmp_path / "budget.json").write_text('{"seconds": {"test": 1000}}')
    code, (*_, line) = run(tmp_path, capsys)
    assert code == 0
    assert line.startswith("test: 1 cases cost ")
    before = float(line.split()[4].replace(",", ""))
    (tmp_path / "budget.json").write_text(json.dumps({"seconds": {"test": before + 0.6}}))
    (tmp_path / "test_slow.py").write_text(SLOW)
    code, (*_, first, grown, above) = run(tmp_path, capsys)
    assert code == 1
    assert first.startswith("test: 21 cases cost ")
    assert_mentions(grown, "test_slow.py: 0.0 -> ")
    assert_mentions(above, f"budget of {before + 0.6:,.0f}", "tests/budget.json")


def test_a_machine_of_half_the_speed_has_the_same_cost() -> None:
    files = {"test_a.py": [2, 30.0, 15.0]}
    quiet = cost.Cost(0, 20.0, 40.0, [0.025, 0.02, 0.09], files)
    slow = cost.Cost(0, 60.0, 80.0, [0.05, 0.04, 0.18], {"test_a.py": [2, 60.0, 50.0]})
    assert quiet.seconds == slow.seconds == 40.0
    assert quiet.by_file() == files
    assert slow.by_file() == {"test_a.py": [2, 30.0, 50.0]}


def test_the_ten_files_that_grew_most_are_named() -> None:
    files = {f"test_{n}.py": [1, float(n), 1.0] for n in range(20)}
    lines = cost.grown(files, {"test_19.py": [1, 18.8, 1.0], "test_5.py": [1, 9.0, 1.0]})
    assert [line.split(":")[0] for line in lines] == [f"test_{n}.py" for n in range(18, 8, -1)]
    assert lines[0] == "test_18.py: 0.0 -> 18.0 s"


def test_times_are_written_by_a_run(tmp_path: Path) -> None:
    table = {"functions": {}, "pieces": {"oldest": OLDEST}}
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "durations.json").write_text(json.dumps(table))
    (tests / "budget.json").write_text('{"seconds": {"test": 50}}')
    (tests / "test_b.py").write_text("def test_one(): ...\n\ndef test_two(): ...\n")
    page = tmp_path / "CONTRIBUTING.md"
    page.write_text(f"before\n{cost._BEGIN}\nold\n{cost._END}\nafter\n")
    ran = cost.Cost(0, 20.0, 40.0, [0.025], {"test_b.py": [3, 1.25, 1.0]})
    cost.write("test", ran, tests)
    written = json.loads((tests / "durations.json").read_text())
    assert written["functions"] == {"test_b.py": 2}
    assert written["pieces"]["test"]["files"] == {"test_b.py": [3, 1.2, 1.0]}
    assert written["pieces"]["oldest"] == table["pieces"]["oldest"]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old\n" not in text
    assert "| `make test` | 3 | 40 | 50 | 20 | 25.0 |" in text
    assert "| test_b.py | 3 | 1.2 |" in text


def test_the_table_of_times_is_of_these_tests() -> None:
    """At most 5% of the functions are others; else `TEST_TIMES=write .ci/run` writes it again."""
    then = json.loads((TESTS / "durations.json").read_text())["functions"]
    now = cost.counts()
    other = sum(abs(now.get(name, 0) - then.get(name, 0)) for name in {*now, *then})
    assert other <= 0.05 * sum(then.values())


def test_what_left_make_test_exists() -> None:
    tiers = json.loads((TESTS / "tiers.json").read_text())
    for file, known in tiers.items():
        names = {name.rpartition("::")[2] for name in known}
        assert names <= {*cost.functions(TESTS / file)}, file
