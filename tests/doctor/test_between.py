"""Differences between the environments of processes, and between their clocks."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replicax.doctor.between import (
    check_clocks,
    check_surroundings,
    judge_clocks,
    judge_surroundings,
    surroundings,
)
from replicax.text.checks import FAIL, NOTE, PASS


def one(**changed: Any) -> dict[str, Any]:
    found = {"versions": {"jax": "0.10.2"}, "variables": {}, "code": {"the code's git commit": "a"}}
    code = {"the uncommitted changes": None, **found["code"]}
    return {**found, "code": code, **changed}


def test_the_same_all_around(together: Any) -> None:
    env = {"XLA_FLAGS": "--a"}
    for (row,) in together(2, lambda peers: check_surroundings(peers, env)):
        assert row.verdict == PASS
        assert "1 variable (XLA_FLAGS)" in row.found


@pytest.mark.parametrize(
    ("changed", "verdict", "words"),
    [
        ({"versions": {"jax": "0.11.0"}}, FAIL, "jax is 0.11.0 on process 2"),
        ({"variables": {"XLA_FLAGS": "--a"}}, NOTE, "XLA_FLAGS is --a on process 2"),
        (
            {"code": {"the code's git commit": "b", "the uncommitted changes": None}},
            FAIL,
            "the code's git commit is b on process 2, a on processes 0 and 1",
        ),
        (
            {"code": {"the code's git commit": "a", "the uncommitted changes": "f00"}},
            FAIL,
            "the uncommitted changes is f00 on process 2",
        ),
    ],
)
def test_a_difference_names_the_process(changed: Any, verdict: str, words: str) -> None:
    (row,) = judge_surroundings([one(), one(), one(**changed)])
    assert row.verdict == verdict
    assert words in row.found
    assert row.cause


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
    commit, changes = (next(key for key in clean if word in key) for word in ("commit", "changes"))
    assert len(clean[commit]) == 40
    assert clean[changes] is None
    (folder / "train.py").write_text("a = 2\n")
    changed = surroundings({})["code"]
    assert changed[commit] == clean[commit]
    assert changed[changes]


def test_threads_share_a_clock(together: Any) -> None:
    for (row,) in together(3, check_clocks):
        assert row.verdict == PASS
        assert row.figures["seconds_ahead_of_process_0"] == pytest.approx([0, 0, 0], abs=0.5)


def test_a_clock_that_is_off_is_named() -> None:
    rounds = [[(100.0 + n, 0.001), (100.1 + n, 0.004), (97.0 + n, 0.002)] for n in range(5)]
    (row,) = judge_clocks(rounds)
    assert row.verdict == NOTE
    assert re.search(r"within 3\.1 s of .*other, ± 4\.00 ms, process 2 farthest", row.found)
    assert row.figures["seconds_ahead_of_process_0"] == pytest.approx([0, 0.1, -3.0])
    assert row.figures["within_seconds"] == pytest.approx([0, 0.004, 0.002])


def test_one_late_answer_is_no_clock_that_is_off() -> None:
    rounds = [[(100.0 + n, 0.001), (100.0 + n, 0.001)] for n in range(5)]
    rounds[2][1] = (107.0, 5.0)
    (row,) = judge_clocks(rounds)
    assert row.verdict == PASS
    assert re.search(r"within 0\.00 ms of .*other, ± 1\.00 ms", row.found)


def test_a_slow_network_accuses_nobody() -> None:
    rounds = [[(100.0, 1.0), (101.5, 1.0)]] * 3
    (row,) = judge_clocks(rounds)
    assert row.verdict == PASS
