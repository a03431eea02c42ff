"""The processes of a job collect garbage at the same steps."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from replicax.train.run.host_memory import COLLECTED_EVERY, Garbage


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    assert gc.isenabled()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_it_is_collected_at_multiples_of_steps_only() -> None:
    garbage = Garbage(2)
    with garbage.restored():
        garbage.begun(1)
        assert gc.isenabled()
        assert gc.get_threshold()[2] > 10**9
        old = Circle()
        circle = weakref.ref(old)
        gc.collect(1)
        del old
        gc.collect(1)  # as Python does by itself: only those that are young
        garbage.stepped(COLLECTED_EVERY - 1)
        assert circle() is not None
        garbage.stepped(COLLECTED_EVERY + 3)  # a call of several steps passed it
        assert circle() is None


def test_one_process_is_left_alone() -> None:
    garbage = Garbage(1)
    with garbage.restored():
        garbage.begun(1)
        assert gc.get_freeze_count() == 0


def test_so_is_one_without_collection() -> None:
    gc.disable()
    try:
        garbage = Garbage(2)
        with garbage.restored():
            garbage.begun(1)
            assert gc.get_freeze_count() == 0
        assert not gc.isenabled()
    finally:
        gc.enable()
