"""Copies of the state: equal, and with one bit flipped on one device."""

import contextlib

import jax
import pytest
from support.bit_flips import before_step, flip_leaf
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.replicas import check_replicas
from replicax.verify.subject import Subject


def flip_first_weight(state: rx.TrainState) -> rx.TrainState:
    return flip_leaf(state, 1, jax.devices()[3], byte=1, bit=2)


@pytest.mark.parametrize("flipped", [False, True])
def test_a_flipped_bit_fails(flipped: bool) -> None:
    dp = rx.DataParallel(zoo.good, zoo.Entry().optimizer(), mode="shard_map")
    subject = Subject(dp, zoo.network(), zoo.data(), 1, 0)
    with before_step(2, flip_first_weight) if flipped else contextlib.nullcontext():
        check = check_replicas(subject, subject.own)
    assert check.verdict == ("fail" if flipped else "pass")
    assert ("params" in check.found) == flipped
