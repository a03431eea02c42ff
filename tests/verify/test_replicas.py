"""Copies of the state: equal, and with one bit flipped on one device."""

import contextlib

import jax
import pytest
from support.bit_flips import before_step, flip_leaf
from verify import zoo_recipes as zoo

import replicax as rx
from replicax.verify.facts import examine
from replicax.verify.program_cases import ProgramCases
from replicax.verify.subject import Subject


def flip_first_weight(state: rx.TrainState) -> rx.TrainState:
    return flip_leaf(state, 1, jax.devices()[3], byte=1, bit=2)


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(("layout", "fsdp"), [("replicated", 1), ("fsdp", 4)])
def test_a_flipped_bit_fails(layout: str, fsdp: int, flipped: bool) -> None:
    """Split parameters have a copy in each group of replicas that shares one."""
    mesh = rx.make_mesh(fsdp=fsdp)
    optimizer = zoo.Entry().optimizer()
    dp = rx.DataParallel(zoo.good, optimizer, mode="shard_map", mesh=mesh, layout=layout)
    subject = Subject(dp, zoo.network(), zoo.data(), 1, 0)
    cases = ProgramCases(subject, examine(subject), lambda text: None)
    with before_step(2, flip_first_weight) if flipped else contextlib.nullcontext():
        check = cases.replicas(subject.own)
    assert check.verdict == ("fail" if flipped else "pass")
    assert ("params" in check.found) == flipped
