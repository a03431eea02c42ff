"""A step that compiles once, and one that is given another program's batch."""

import jax
import pytest
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.recompilation import check_recompilation
from replicax.verify.subject import Subject


def test_a_batch_of_another_shape_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = rx.DataParallel(zoo.good, zoo.Entry().optimizer(), mode="single")
    subject = Subject(dp, zoo.network(), zoo.data(), 1, 0)
    assert check_recompilation(subject, padded=True).verdict == "pass"
    some = subject.some
    monkeypatch.setattr(
        subject, "some", lambda rows: jax.tree.map(lambda leaf: leaf[:-8], some(rows))
    )
    assert check_recompilation(subject, padded=True).verdict == "fail"
