"""Bytes and FLOPs of a step against the necessary ones."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from support.agreement import How, data_parallel, on
from support.cases import TOWER
from support.figures import assert_mentions
from support.tiers import exhaustive
from support.training import parallel
from verify import zoo_recipes as zoo
from verify.warm import warm_subject

import replicax as rx
from replicax.analysis.compiled import Collectives, CompiledStep
from replicax.core.modes.mode_table import MODES
from replicax.verify.facts import examine_subject
from replicax.verify.subject import Case, Subject
from replicax.verify.traffic import (
    CompiledCase,
    SentOverAxes,
    check_traffic,
    check_work,
    read_programs,
)


def with_offset(model: Any, batch: Any, key: Any) -> Any:
    return zoo.errors(model, batch) + 1e-3 * jnp.sum(model["offset"] ** 2)


@pytest.fixture(scope="module")
def subject() -> Subject:
    dp = parallel(zoo.good, zoo.Entry().optimizer(), mode="shard_map")
    return warm_subject(dp, zoo.network(), zoo.data(), 2, 0)


def program(case: Case, count: int, size: int, flops: int = 100) -> CompiledCase:
    step = CompiledStep(None, flops, (Collectives("all-reduce", count, size),))
    sent = (
        (SentOverAxes("all-reduce", count, size, ("data",), 2 * size * 3 / 4, 0.0),)
        if count
        else ()
    )
    return CompiledCase(case, step, sent)


@pytest.mark.parametrize(
    ("count", "size", "verdict"),
    [(1, 360, "pass"), (2, 540, "note"), (2, 20_000, "fail"), (0, 0, "fail")],
)
def test_verdicts_by_bytes(subject: Subject, count: int, size: int, verdict: str) -> None:
    programs = {subject.own: program(subject.own, count, size)}
    (check,) = check_traffic(subject, examine_subject(subject), programs)
    assert check.verdict == verdict


def test_reductions_that_grow_with_micro_batches(subject: Subject) -> None:
    """They fail if the user trains so, and are a note otherwise."""
    cases = [subject.case(MODES["shard_map"], count) for count in (1, 2)]
    programs = {case: program(case, case.micro_batches, 360) for case in cases}
    facts = examine_subject(subject)
    one, two = check_traffic(subject, facts, programs)
    assert (one.verdict, two.verdict) == ("pass", "note")
    subject.own, own = cases[1], subject.own
    try:
        _, two = check_traffic(subject, facts, programs)
    finally:
        subject.own = own
    assert two.verdict == "fail"
    assert_mentions(two.cause, "inside the", "the loop")


@pytest.mark.parametrize(
    ("flops", "verdict"), [(25, "pass"), (40, "note"), (100, "fail"), (0, "skip")]
)
def test_work(subject: Subject, flops: int, verdict: str) -> None:
    programs = {subject.own: program(subject.own, 1, 360, flops)}
    (check,) = check_work(subject, programs, CompiledStep(None, 100, ()))
    assert check.verdict == verdict


@pytest.mark.parametrize(
    ("data", "rules", "times", "verdict"),
    [
        (2, {"first": (None, "model"), "bias": ("model",), "last": ("model",)}, 1, "pass"),
        (2, {"offset": ("model",)}, 2, "fail"),
        (1, {"offset": ("model",)}, 4, "fail"),
    ],
)
def test_work_is_that_of_all_devices(
    data: int, rules: dict[str, Any], times: int, verdict: str
) -> None:
    """Devices of a replica that split no product compute the same."""
    mesh = rx.make_mesh(data, 4 // data, devices=jax.devices()[:4])
    layout = [(path, PartitionSpec(*spec)) for path, spec in {**rules, "": ()}.items()]
    dp = rx.DataParallel(with_offset, optax.adam(1e-2), mesh=mesh, layout=layout)
    of = warm_subject(dp, {**zoo.network(), "offset": jnp.ones(8)}, zoo.data(), 1, 0)
    programs = read_programs(of, [of.own, of.case(MODES["single"])])
    (check, _) = check_work(of, programs, programs[of.case(MODES["single"])].step)
    assert check.verdict == verdict
    assert 4 * check.figures["flops_per_device"] == times * check.figures["flops_of_one"]


def test_a_frozen_parameter_is_not_reduced() -> None:
    """The optimizer does not read its gradient, so it is never computed."""
    dp = parallel(zoo.good, zoo.frozen_optimizer(), mode="shard_map")
    of = warm_subject(dp, zoo.network(), zoo.data(), 1, 0)
    (check,) = check_traffic(of, examine_subject(of), read_programs(of, [of.own]))
    assert check.verdict == "pass"
    assert check.figures["bytes"] == 2 * 3 / 4 * (4 * (8 + 8 * 4) + 12)


@pytest.mark.parametrize(
    ("how", "most", "inside"),
    [
        exhaustive((on("shard_map", "zero1", data=4, accumulate=2), 1, False)),
        (on("shard_map", "fsdp", data=4), 1.5, False),
        exhaustive((on("shard_map", "zero1", data=2, fsdp=2), 1, False)),
        exhaustive((on("shard_map", "fsdp", data=2, fsdp=2), 4 / 3, False)),
        (on("jit", data=2, stage=2, accumulate=2), 1, True),
        exhaustive((on("jit", "replicated", "gpipe", data=2, stage=2, accumulate=2), 1, True)),
    ],
    ids=str,
)
def test_a_layout_sends_what_it_has_to(how: How, most: float, inside: bool) -> None:
    """Multiples of the bytes of one all-reduce of the gradient; traffic in a replica is apart."""
    dp, rows = data_parallel(TOWER, how), {name: leaf[:48] for name, leaf in TOWER.source.items()}
    of = warm_subject(dp, TOWER.model(), rows, 1, 0)
    programs = read_programs(of, [of.own, of.case(MODES["single"])])
    (sent,) = check_traffic(of, examine_subject(of), {of.own: programs[of.own]})
    (work, _) = check_work(of, programs, programs[of.case(MODES["single"])].step)
    assert (sent.verdict, work.verdict) == ("pass", "pass")
    assert sent.figures["bytes"] <= 1.02 * most * sent.figures["least_bytes"]
    assert (sent.figures["bytes_inside"] > 0) == inside
