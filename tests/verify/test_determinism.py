"""Two runs, and two traces."""

from typing import Any

import pytest
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.determinism import check_determinism
from replicax.verify.subject import Subject


@pytest.mark.parametrize(
    ("loss", "runs", "traces"),
    [
        (zoo.good, "pass", "pass"),
        (zoo.dropout, "pass", "pass"),
        (zoo.host_random, "fail", "pass"),
        (zoo.traced_random, "pass", "fail"),
    ],
)
def test_verdicts(loss: Any, runs: str, traces: str) -> None:
    dp = rx.DataParallel(loss, zoo.Entry().optimizer(), mode="single")
    subject = Subject(dp, zoo.network(), zoo.data(), 1, 0)
    assert [check.verdict for check in check_determinism(subject)] == [runs, traces]
