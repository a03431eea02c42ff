"""Audits in `fit`: a flipped bit is found, its device named, and the run stops or goes back."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.audit_trials import SUBJECTS, Subject
from support.bit_flips import before_step, flip_leaf, leaf_names
from support.cases import CASES
from support.command_line import Main
from support.figures import assert_mentions
from support.processes import SUPPORT, Ended, run_job
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.errors import ConfigError, DivergedError, ReplicasDifferError
from replicax.train.files.fingerprint import sha256

CASE = CASES["linen"]
OTHER_MODES = ("shard_map", "pmap", "exact")
TOP = 30
"""The highest bit of a float32's exponent: with it, weights are about 1e37."""


def make(devices: int, **options: Any) -> rx.DataParallel:
    mesh = rx.make_mesh(data=devices)
    return rx.DataParallel(CASE.loss, optax.adamw(1e-3), mesh=mesh, **options)


@pytest.fixture(scope="module")
def eight() -> rx.DataParallel:
    return make(8)


@pytest.fixture(scope="module")
def two() -> rx.DataParallel:
    return make(2, mode="shard_map")


def fit(dp: rx.DataParallel, **settings: Any) -> rx.types.Fit:
    """Run `fit` with an audit every 10 steps, or with `audit`; None for no audits."""
    settings = {"batch_size": 16, "steps": 30, "progress": False, **settings}
    audit = settings.pop("audit", rx.hooks.Audit(10))
    source = settings.pop("source", CASE.source)
    hooks = [] if audit is None else [audit]
    return rx.fit(dp, dp.init(CASE.model()), source, hooks=hooks, **settings)


def restoring() -> dict[str, Any]:
    return {"audit": rx.hooks.Audit(10, "restore")}


def flipping(device: int, bit: int = 20, leaf: str = "params") -> Callable[[Any], Any]:
    """Flip a bit in the last leaf of that name; rounding may heal the lowest in a few steps."""

    def change(state: Any) -> Any:
        number = [n for n, name in enumerate(leaf_names(state)) if leaf in name][-1]
        return flip_leaf(state, number, jax.devices()[device], bit // 8, bit % 8)

    return change


def message(dp: rx.DataParallel, step: int, change: Any, times: int = 1, **settings: Any) -> str:
    with before_step(step, change, times), pytest.raises(ReplicasDifferError) as stopped:
        fit(dp, **settings)
    assert stopped.value.exit_code == 1
    return str(stopped.value)


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def told(result: rx.types.Fit) -> list[Any]:
    """Return the records of the training without times."""
    return [(r.kind, r.step, r.epoch, r.metrics, r.rows) for r in result.records]


@pytest.mark.parametrize("mode", only(["jit"], ["jit", *OTHER_MODES]))
def test_clean_audits_are_counted_in_every_mode(mode: str) -> None:
    audit = rx.hooks.Audit(10)
    result = fit(make(8, mode=mode), steps=25, audit=audit)
    assert (audit.clean, audit.restores, result.steps) == (3, 0, 25)
    assert all(set(record.metrics) == {"loss", "accuracy"} for record in result.records)


@pytest.mark.parametrize("device", [0, 5])
@pytest.mark.parametrize("leaf", ["params", "opt_state", "step"])
def test_a_flipped_bit_stops_the_run_and_names_the_device(
    eight: rx.DataParallel, device: int, leaf: str
) -> None:
    said = message(eight, 13, flipping(device, 22, leaf))
    first = "params" if leaf == "opt_state" else leaf  # a wrong moment has moved its parameter
    assert said.startswith(f"device {device} of process 0 ")
    assert_mentions(
        said, "wrong bits", f"in {first}", "after step 20; all", "after step 10: restart"
    )
    assert_mentions(said, "restart without", "without device", "to step 10")
    assert "\n" not in said


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1)])
def test_a_bit_that_makes_everything_nan_is_found_at_once(optimizer: Any) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return (model["w"] * batch["x"] - batch["y"]) ** 2

    x = np.linspace(-1, 1, 32).astype(np.float32)
    dp = rx.DataParallel(loss, optimizer, mode="shard_map")
    state = dp.init({"w": jnp.float32(0.5)})
    with (
        before_step(12, flipping(3, TOP)),
        pytest.raises(ReplicasDifferError, match="device 3 of process 0 holds wrong"),
    ):
        rx.fit(
            dp,
            state,
            {"x": x, "y": 2 * x},
            batch_size=16,
            steps=30,
            hooks=[rx.hooks.Audit(1000)],
            progress=False,
        )


def test_the_last_state_is_audited_too(eight: rx.DataParallel) -> None:
    said = message(eight, 25, flipping(3), steps=25)
    assert_mentions(said, "after step 25; all", "after step 20")


def test_a_state_that_differs_before_the_first_step_is_refused(eight: rx.DataParallel) -> None:
    state = flipping(7)(eight.init(CASE.model()))
    hooks = [rx.hooks.Audit(1)]
    with pytest.raises(ReplicasDifferError, match=r"device 7 .*before the\b.*first step"):
        rx.fit(eight, state, CASE.source, batch_size=16, steps=3, hooks=hooks, progress=False)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("bit", [8, 20, TOP])
def test_with_two_replicas_a_replay_decides(two: rx.DataParallel, device: int, bit: int) -> None:
    said = message(two, 13, flipping(device, bit))
    assert said.startswith(f"device {device} of process 0 ")
    assert f"device {1 - device} of process 0: restart" in said


def test_a_replay_ends_where_the_state_stood_still(two: rx.DataParallel) -> None:
    def change(state: Any) -> Any:
        leaves, tree = jax.tree.flatten(state)
        number = leaf_names(state).index("params['Dense_1']['bias']")
        parts = [part.data for part in leaves[number].addressable_shards]
        parts[1] = jax.device_put(parts[1] * jnp.nan, parts[1].sharding)
        where = (leaves[number].shape, leaves[number].sharding)
        leaves[number] = jax.make_array_from_single_device_arrays(*where, parts)
        return tree.unflatten(leaves)

    said = message(two, 13, change)
    assert re.search(r"replay of 2 steps .*\bbits of\b.*device 0 of process 0", said)


def test_with_two_replicas_and_an_iterator_nobody_is_named(two: rx.DataParallel) -> None:
    batches = ({name: leaf[:16] for name, leaf in CASE.source.items()} for _ in range(99))
    said = message(two, 13, flipping(1), source=batches)
    assert said.startswith("devices 0 and 1 of process 0 ")
    assert_mentions(said, "different bits", "in params", "unknown: test", "these devices")


@pytest.mark.parametrize("devices", only([2], [8, 2]))
@pytest.mark.parametrize("step", only([13], [4, 13, 20, 21, 30]))
def test_a_restored_run_is_the_undisturbed_one(
    devices: int, step: int, eight: rx.DataParallel, two: rx.DataParallel, folder: Path
) -> None:
    dp = eight if devices == 8 else two
    settings = {"log_every": 3, "eval_source": CASE.source}
    calm, audit = rx.hooks.Audit(10, "restore"), rx.hooks.Audit(10, "restore")
    undisturbed = fit(dp, audit=calm, **settings)
    with before_step(step, flipping(1, 21)):
        result = fit(dp, audit=audit, run_dir=folder / "run", **settings)
    assert (calm.restores, audit.restores) == (0, 1)
    assert same(undisturbed.state, result.state)
    assert (result.steps, result.rows) == (30, undisturbed.rows)
    back = [record for record in told(result) if record[0] == "restore"]
    assert [each for each in told(result) if each not in back] == told(undisturbed)
    ((_, good, _, metrics, _),) = back
    assert good == (step - 1) // 4 * 4 or good == (step - 1) // 10 * 10  # epochs end too
    found = next(n for n in range(step, 31) if n % 4 == 0 or n % 10 == 0)
    assert (metrics["device_1"], metrics["steps_lost"]) == (1.0, found - good)
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert [(r["kind"], r["step"]) for r in written] == [each[:2] for each in told(result)]
    assert result.metrics == undisturbed.metrics


def test_a_fault_that_stays_ends_the_run_after_three_restores(eight: rx.DataParallel) -> None:
    said = message(eight, 13, flipping(6), times=1000, **restoring())
    assert said.startswith("device 6 of process 0 ")
    assert_mentions(said, "wrong bits", "in params")
    assert "again after 3 restores" in said


def to_nan(state: Any) -> Any:
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    return dataclasses.replace(state, params=params)


ALONE = rx.Guard(max_bad_steps=1000)
"""A guard with which only the audit ends a run of bad steps."""
X = CASE.source["x"].copy()
X[17] = np.nan  # in the second of an epoch's four batches
BESIDE_BAD_BATCHES = {"source": {**CASE.source, "x": X}, "guard": ALONE, "shuffle": False}


def test_a_run_that_is_nan_by_itself_is_no_devices_fault(eight: rx.DataParallel) -> None:
    """Its steps are skipped, and the audit names the leaf that stays not finite."""
    said = r"^not finite at step 20: params.*all replicas hold the same bits"
    with before_step(13, to_nan), pytest.raises(DivergedError, match=said):
        fit(eight, guard=ALONE)


@pytest.mark.parametrize("devices", [2, 8])
def test_a_bad_batch_is_no_devices_fault(
    devices: int, eight: rx.DataParallel, two: rx.DataParallel
) -> None:
    audit, dp = rx.hooks.Audit(10), eight if devices == 8 else two
    result = fit(dp, audit=audit, **BESIDE_BAD_BATCHES)
    skipped = [record.step for record in result.records if record.kind == "skip"]
    assert skipped == list(range(2, 31, 4))
    assert audit.clean == 3


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("step", [13, 14, 15, 18])
def test_a_bit_is_found_beside_bad_batches(two: rx.DataParallel, step: int, device: int) -> None:
    """Steps 14 and 18 are bad anyway; the replay skips them as the run did."""
    said = message(two, step, flipping(device, 20), **BESIDE_BAD_BATCHES)
    assert f"device {device} of process 0 " in said
    assert_mentions(said, "wrong bits", "in params", "restart without")
    assert f"{1 - device} of process 0: restart" in said


def test_an_iterator_cannot_go_back(eight: rx.DataParallel) -> None:
    with pytest.raises(ConfigError, match=r"restore.*an iterator\b.*batches"):
        fit(eight, **restoring(), source=iter([]))


def test_one_device_has_nothing_to_compare_with() -> None:
    with pytest.raises(ConfigError, match=r"\bnothing\b.*compare\b.*one device"):
        fit(rx.DataParallel(CASE.loss, optax.sgd(0.1), mode="single"))


def test_split_parameters_are_compared_where_several_devices_hold_a_part() -> None:
    """Four groups of two devices share a copy each."""
    mesh = rx.make_mesh(fsdp=2)
    dp = rx.DataParallel(CASE.loss, optax.adamw(1e-3), mesh=mesh, mode="shard_map", layout="fsdp")
    said = message(dp, 15, flipping(5))
    assert said.startswith("device 5 of process 0 ")
    assert_mentions(said, "wrong bits", "in params")


def test_the_flags_of_the_command_line(main: Main) -> None:
    flags = ["--devices", "2", "--steps", "6", "--audit-every", "3", "--run", "one"]
    code, out, _ = main("train", "linear_regression", *flags)
    assert code == 0
    assert "audit  every 3 steps: " in out
    assert "audit  2 clean" in out.splitlines()


@EXHAUSTIVE
def test_random_flips_are_found_in_time() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    for subject in (Subject(*each) for each in SUBJECTS):
        for part, trials in (("params", 20), ("opt_state", 5)):
            for _ in range(trials):
                trial = subject.trial(part, draw)
                assert trial.outcome in ("detected", "healed"), trial


def job(*arguments: object) -> list[Ended]:
    return run_job(SUPPORT / "job_audit.py", *arguments, devices=2)


@pytest.fixture(scope="module")
def alone() -> list[Ended]:
    """Two processes of one device each; the weights of one of them change."""
    return [
        ended
        for process in (0, 1)
        for ended in run_job(SUPPORT / "job_audit.py", process, 6, "stop", devices=1)
    ]


@EXHAUSTIVE
def test_a_replay_decides_between_two_processes(alone: list[Ended]) -> None:
    for process, (first, second) in enumerate((alone[:2], alone[2:])):
        assert first.code == second.code == 1
        assert first.err == second.err
        assert re.search(rf"of process {process} .*wrong bits .*params\['in'\]", first.err)
        assert f"of process {1 - process}: restart" in first.err


@EXHAUSTIVE
def test_processes_go_back_together() -> None:
    disturbed, undisturbed = job(1, 6, "restore"), job(1, 99, "restore")
    norms = [ended.out.splitlines()[-1].split() for ended in (*disturbed, *undisturbed)]
    assert len({norm[1] for norm in norms}) == 1
    assert [norm[3] for norm in norms] == ["1", "1", "0", "0"]


@pytest.mark.usefixtures("optimized")
def test_audits_leave_the_bits_of_exact_as_they_are() -> None:
    """Otherwise digests could be compared only among runs with audits, or only without."""
    dp = make(4, mode="exact")
    assert sha256(fit(dp).state) == sha256(fit(dp, audit=None).state)
