"""Which installations fit together."""

import pytest

from replicax.doctor.row import OK, PROBLEM, WARNING
from replicax.doctor.versions import check_versions, judge_versions, requirements

RANGES = {"jax": "<0.12,>=0.10.2", "numpy": ">=2.0", "flax": "<0.13,>=0.12"}
FITTING = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6"}


def test_this_installation_is_well() -> None:
    (row,) = check_versions()
    assert row.verdict == OK
    for package in ("python 3.", "replicax ", "jax 0.", "jaxlib 0.", "numpy ", "optax ", "flax "):
        assert package in row.found


def test_the_ranges_are_those_of_the_package() -> None:
    assert requirements()["jax"] == "<0.12,>=0.10.2"
    assert requirements()["flax"] == "<0.13,>=0.12"
    assert "pytest" not in requirements()


@pytest.mark.parametrize(
    ("changed", "verdict", "words"),
    [
        ({"jax": "0.10.1", "jaxlib": "0.10.1"}, PROBLEM, ["0.10.1 is older than 0.10.2"]),
        ({"jax": "0.9.9", "jaxlib": "0.9.9"}, PROBLEM, ["jax 0.9.9"]),
        ({"jax": "0.12.0", "jaxlib": "0.12.0"}, WARNING, ["0.12.0 is newer", "<0.12"]),
        ({"flax": "0.11.2"}, PROBLEM, ["flax 0.11.2"]),
        ({"jaxlib": "0.10.1"}, WARNING, ["jax 0.10.2 with jaxlib 0.10.1"]),
        ({"jax-cuda13-plugin": "0.10.1"}, PROBLEM, ["jax-cuda13-plugin 0.10.1"]),
        ({"jax-cuda12-pjrt": "0.11.0"}, PROBLEM, ["jax-cuda12-pjrt 0.11.0"]),
    ],
)
def test_a_misfit_has_its_row_and_an_install_line(
    changed: dict[str, str], verdict: str, words: list[str]
) -> None:
    all_of_them, misfit = judge_versions("3.11.7", FITTING | changed, RANGES)
    assert all_of_them.verdict == OK
    assert misfit.verdict == verdict
    assert misfit.fix.startswith("pip install")
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
