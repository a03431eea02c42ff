"""What differs around the processes."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from replicax.core.job import Alone
from replicax.doctor.row import OK, PROBLEM, SKIPPED, WARNING
from replicax.doctor.surroundings import check_surroundings, judge_surroundings, surroundings


def one(**changed: Any) -> dict[str, Any]:
    found = {"versions": {"jax": "0.10.2"}, "variables": {}, "code": {"the code's git commit": "a"}}
    code = {"the uncommitted changes": None, **found["code"]}
    return {**found, "code": code, **changed}


def test_one_process_has_nothing_to_compare() -> None:
    (row,) = check_surroundings(Alone(), {})
    assert row.verdict == SKIPPED


def test_the_same_all_around(together: Any) -> None:
    env = {"XLA_FLAGS": "--a"}
    for (row,) in together(2, lambda peers: check_surroundings(peers, env)):
        assert row.verdict == OK
        assert "1 variable (XLA_FLAGS)" in row.found


@pytest.mark.parametrize(
    ("changed", "verdict", "words"),
    [
        ({"versions": {"jax": "0.11.0"}}, PROBLEM, "jax is 0.11.0 on process 2"),
        ({"variables": {"XLA_FLAGS": "--a"}}, WARNING, "XLA_FLAGS is --a on process 2"),
        (
            {"code": {"the code's git commit": "b", "the uncommitted changes": None}},
            PROBLEM,
            "the code's git commit is b on process 2, a on processes 0 and 1",
        ),
        (
            {"code": {"the code's git commit": "a", "the uncommitted changes": "f00"}},
            PROBLEM,
            "the uncommitted changes is f00 on process 2",
        ),
    ],
)
def test_a_difference_names_the_process(changed: Any, verdict: str, words: str) -> None:
    (row,) = judge_surroundings([one(), one(), one(**changed)])
    assert row.verdict == verdict
    assert words in row.found
    assert row.fix


def test_variables_that_matter() -> None:
    env = {
        "XLA_FLAGS": "--a",
        "JAX_ENABLE_X64": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "LD_LIBRARY_PATH": "/opt",
        "MALLOC_MMAP_MAX_": "0",
        "JAX_PROCESS_ID": "1",
        "REPLICAX_PROCESS_ID": "1",
        "CUDA_VISIBLE_DEVICES": "1",
        "HOME": "/root",
    }
    assert list(surroundings(env)["variables"]) == [
        "JAX_ENABLE_X64",
        "LD_LIBRARY_PATH",
        "MALLOC_MMAP_MAX_",
        "NCCL_SOCKET_IFNAME",
        "XLA_FLAGS",
    ]


def test_the_code_of_the_working_directory(folder: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *who, *arguments], check=True, capture_output=True)

    assert set(surroundings({})["code"].values()) == {None}
    (folder / "train.py").write_text("a = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    clean = surroundings({})["code"]
    assert len(clean["the code's git commit"]) == 40
    assert clean["the uncommitted changes"] is None
    (folder / "train.py").write_text("a = 2\n")
    changed = surroundings({})["code"]
    assert changed["the code's git commit"] == clean["the code's git commit"]
    assert changed["the uncommitted changes"]
