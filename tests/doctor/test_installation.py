"""Installations that fit together, and limits of the system."""

import re
from typing import Any

import pytest

from replicax.doctor.installation import judge_limits, judge_versions, requirements
from replicax.text.checks import FAIL, NOTE, PASS

RANGES = {"jax": "<0.13,>=0.10.2", "numpy": ">=2.0", "flax": "<0.13,>=0.12.2"}
FITTING = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6"}


def test_the_ranges_are_those_of_the_package() -> None:
    assert requirements()["jax"] == "<0.13,>=0.10.2"
    assert requirements()["flax"] == "<0.13,>=0.12.2"
    assert "pytest" not in requirements()


@pytest.mark.parametrize(
    ("changed", "verdict", "words"),
    [
        ({"jax": "0.10.1", "jaxlib": "0.10.1"}, FAIL, ["0.10.1 is older than 0.10.2"]),
        ({"jax": "0.9.9", "jaxlib": "0.9.9"}, FAIL, ["jax 0.9.9"]),
        ({"jax": "0.13.0", "jaxlib": "0.13.0"}, NOTE, ["0.13.0 is newer", "<0.13"]),
        ({"flax": "0.12.1"}, FAIL, ["flax 0.12.1"]),
        ({"jaxlib": "0.10.1"}, NOTE, ["jax 0.10.2 with jaxlib 0.10.1"]),
        ({"jax-cuda13-plugin": "0.10.1"}, FAIL, ["jax-cuda13-plugin 0.10.1"]),
        ({"jax-cuda12-pjrt": "0.11.0"}, FAIL, ["jax-cuda12-pjrt 0.11.0"]),
    ],
)
def test_a_misfit_has_its_row_and_an_install_line(
    changed: dict[str, str], verdict: str, words: list[str]
) -> None:
    all_of_them, misfit = judge_versions("3.11.7", FITTING | changed, RANGES)
    assert all_of_them.verdict == PASS
    assert misfit.verdict == verdict
    assert misfit.cause.startswith("pip install")
    for word in words:
        assert word in misfit.found


@pytest.mark.parametrize(
    "versions",
    [
        {"jax": "0.11.4", "jaxlib": "0.11.4", "jax-cuda13-plugin": "0.11.4"},
        {"jax": "0.10.2.dev20260101", "jaxlib": "0.10.2.dev20260101"},
        {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2.post1"},
        {"numpy": "10.0"},
    ],
)
def test_what_fits(versions: dict[str, str]) -> None:
    assert len(judge_versions("3.13.0", versions, RANGES)) == 1


@pytest.mark.parametrize(
    ("limits", "env", "verdicts", "words", "cause"),
    [
        (
            (65536, 65536, 10**10, True),
            {"MALLOC_MMAP_MAX_": "0"},
            [PASS],
            r"^65,536 open files · /dev/shm 10\.0 GB · malloc MALLOC_MMAP_MAX_=0$",
            "",
        ),
        ((-1, -1, None, False), {}, [PASS], r"^unlimited\b\D*open files · malloc def\D*$", ""),
        ((256, 4096, None, False), {}, [PASS, NOTE], "256 open files.*4,096 is the", "ulimit -n"),
        # Little shared memory matters to GPUs.
        ((1024, 1024, 64 * 10**6, False), {}, [PASS], "", ""),
        ((1024, 1024, 64 * 10**6, True), {}, [PASS, NOTE], "64 MB", "--shm-size"),
    ],
)
def test_limits(
    limits: tuple[Any, ...], env: dict[str, str], verdicts: list[str], words: str, cause: str
) -> None:
    rows = judge_limits(*limits, env)
    assert [row.verdict for row in rows] == verdicts
    assert re.search(words, rows[-1].found)
    assert cause in rows[-1].cause
