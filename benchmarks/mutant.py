"""Run chosen tests in a copy of the tree whose source is changed; benchmarks/mutations.py forks it.

`mutant.py TREE TOLD KILLS` writes the names of the tests that failed to the file TOLD.
"""

import json
import os
import sys
from pathlib import Path

import pytest


class Failures:
    """The plugin: names of tests that failed, and of files that could not be collected."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def main() -> None:
    tree, told, kills = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.chdir(tree)
    paths = [str(tree / "src"), str(tree / "tests")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    failures = Failures()
    options = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", f"--maxfail={kills}"]
    pytest.main([*options, "@chosen.txt"], plugins=[failures])
    told.with_suffix(".part").write_text(json.dumps(failures.names))
    told.with_suffix(".part").rename(told)


if __name__ == "__main__":
    main()
