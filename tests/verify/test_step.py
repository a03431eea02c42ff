"""`verify_step`: what it takes and refuses, and its messages."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.figures import refused
from support.tiers import EXHAUSTIVE
from verify import step_parts as zoo

from replicax.errors import ConfigError
from replicax.text.checks import Check
from replicax.verify.step import verify_step
from replicax.verify.step_files import verify_files
from replicax.verify.verification import Verification


def of(verification: Verification, subject: str, case: str | None = None) -> Check:
    (check,) = [
        check
        for check in verification.checks
        if check.subject == subject and case in (None, check.case)
    ]
    return check


def verified(step: Any, reference: Any = zoo.reference, **options: Any) -> Verification:
    return verify_step(step, reference, zoo.only_params(), zoo.batch(), **{"steps": 1, **options})


@pytest.fixture(scope="module")
def correct() -> Verification:
    return verify_step(
        zoo.sharded(zoo.masked_rightly)(),
        zoo.masked_reference,
        zoo.only_params(),
        zoo.masked_batch(),
    )


def test_every_subject_has_a_row(correct: Verification) -> None:
    rows = [(check.subject, check.case) for check in correct.checks]
    assert rows == [
        ("parity", "full batch"),
        ("parity", "2 steps"),
        ("parity", "unequal weights"),
        ("parity", "padded batch"),
        ("parity", "indivisible batch"),
        ("replicas", "8 replicas"),
        ("reduction", "full batch"),
        ("traffic", "full batch"),
        ("redundant work", "full batch"),
        ("parameters", "3 steps"),
        ("determinism", "two runs"),
        ("recompilation", "same shapes"),
    ]
    indivisible = of(correct, "parity", "indivisible batch")
    assert indivisible.verdict == "note"
    assert "refuses 59 rows" in indivisible.found


def test_is_what_json_can_hold(correct: Verification) -> None:
    again = json.loads(json.dumps(correct.to_json()))
    assert again["ok"] is True
    assert again["checks"][0]["subject"] == "parity"
    broken = verified(zoo.sharded(zoo.sgd(zoo.same, zoo.pmean))())
    assert json.loads(json.dumps(broken.to_json()))["ok"] is False


@EXHAUSTIVE
def test_a_failed_full_batch_leaves_out_the_others() -> None:
    verification = verified(zoo.sharded(zoo.sgd(zoo.psum, zoo.pmean))(), steps=2)
    assert of(verification, "parity", "other cases").verdict == "skip"


def test_the_step_may_donate_arrays_of_the_user() -> None:
    """The user's arrays are still there."""
    state = jax.device_put(zoo.only_params(), NamedSharding(zoo.mesh(), zoo.WHOLE))
    rows = jax.device_put(zoo.batch(), NamedSharding(zoo.mesh(), zoo.SPLIT))
    step = jax.jit(zoo.reference, donate_argnums=0)
    assert verify_step(step, zoo.reference, state, rows, steps=2).ok
    assert np.isfinite(jax.device_get(state)["params"]["in"]["kernel"]).all()


def test_a_state_alone_may_be_returned() -> None:
    def alone(state: Any, rows: Any) -> Any:
        return zoo.reference(state, rows)[0]

    step = zoo.sharded(lambda state, rows: zoo.good(state, rows)[0])()
    verification = verified(step, alone)
    assert verification.ok
    assert of(verification, "parity", "full batch").figures["leaves"] == 4


def test_a_state_of_parts_may_be_returned_in_parts() -> None:
    def parts(state: Any, rows: Any) -> Any:
        after, metrics = zoo.reference({"params": state[0]}, rows)
        return after["params"], state[1] + 1, metrics["loss"]

    step = zoo.global_view(parts, zoo.SPLIT)()
    state = (zoo.params(), np.int32(0))
    assert verify_step(step, parts, state, zoo.batch(), steps=1).ok


@EXHAUSTIVE
def test_metrics_that_only_one_returns_are_left_out() -> None:
    def more(state: Any, rows: Any) -> Any:
        after, metrics = zoo.reference(state, rows)
        return after, {**metrics, "squared": metrics["loss"] ** 2}

    assert verified(zoo.sharded(zoo.good)(), more).ok


def test_fewer_replicas_than_devices() -> None:
    step = jax.pmap(zoo.good, axis_name=zoo.AXIS, devices=jax.devices()[:4])
    verification = verified(step, replicas=4)
    assert verification.ok
    assert verification.about["devices"] == 4


def test_a_frozen_leaf_is_noted() -> None:
    def frozen(state: Any, rows: Any) -> Any:
        after, loss = zoo.masked_reference(state, rows)
        return {"params": {**after["params"], "in": state["params"]["in"]}}, loss

    step = zoo.global_view(frozen, zoo.SPLIT)()
    verification = verify_step(step, frozen, zoo.only_params(), zoo.masked_batch(), steps=1)
    note = of(verification, "parameters")
    assert note.verdict == "note"
    assert note.figures["unchanged"] == [
        "state['params']['in']['bias']",
        "state['params']['in']['kernel']",
    ]


def test_a_state_that_comes_back_in_another_dtype_is_noted() -> None:
    def counted(state: Any, rows: Any) -> Any:
        after, metrics = zoo.reference({"params": state["params"]}, rows)
        return {**after, "steps": state["steps"] + jnp.float32(1)}, metrics

    step = zoo.global_view(counted, zoo.SPLIT)()
    state = {**zoo.only_params(), "steps": np.int32(0)}
    note = of(verify_step(step, counted, state, zoo.batch(), steps=1), "recompilation")
    assert note.verdict == "note"
    assert re.search(r"state\['steps'\] .*in as .*32\[\] .*back as .*32\[\]", note.cause)


@EXHAUSTIVE
def test_reductions_of_every_micro_batch_are_noted() -> None:
    verification = verified(zoo.sharded(zoo.reduced_each_time)(), micro_batches=zoo.K)
    traffic = of(verification, "traffic")
    assert verification.ok
    assert traffic.verdict in ("pass", "note")
    assert traffic.figures["collectives"]["all-reduce"]["count"] >= zoo.K


def test_a_warm_up_does_not_hide_the_gradient() -> None:
    """Its first learning rate is 0, so that the first step changes nothing."""

    def warmed(reduce: Any) -> Any:
        def update(state: Any, rows: Any) -> Any:
            loss, gradient = jax.value_and_grad(zoo.mean_loss)(state["params"], rows)
            rate = 0.1 * state["steps"].astype(jnp.float32)
            after = zoo.descend(state["params"], reduce(gradient), rate)
            return {"params": after, "steps": state["steps"] + 1}, loss

        return update

    state = {**zoo.only_params(), "steps": np.int32(0)}
    step = zoo.sharded(lambda state, rows: warmed(zoo.psum)(state, rows)[0])()
    verification = verify_step(
        step, lambda state, rows: warmed(zoo.same)(state, rows)[0], state, zoo.batch(), steps=1
    )
    assert "exactly 8 times" in of(verification, "parity", "full batch").cause


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "maks"}, "weights='maks'"),
        ({"replicas": 1}, "1 device"),
        ({"replicas": -2}, "replicas=-2"),
        ({"replicas": 16}, "replicas=16 with 8 devices"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"steps": 0}, "steps=0"),
        ({"batch": {"x": np.zeros((8, 6)), "y": np.zeros(6)}}, "['x'] 8, ['y'] 6"),
        ({"batch": {"x": np.zeros((8, 6))}}, "the reference fails"),
        ({"step": lambda state, rows: 1 / 0}, "(ZeroDivisionError"),
        ({"step": lambda state, rows: jnp.zeros(3)}, "(state, metrics)"),
    ],
)
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], words: str) -> None:
    usual = {
        "step": zoo.sharded(zoo.good)(),
        "reference": zoo.reference,
        "state": zoo.only_params(),
        "batch": zoo.batch(),
    }
    with refused(ConfigError, words):
        verify_step(**{**usual, **change})


def test_rows_that_do_not_divide_are_refused() -> None:
    rows = {key: value[:60] for key, value in zoo.batch().items()}
    step = zoo.of_whole_batch(zoo.filled_to_fit)()
    with pytest.raises(ConfigError, match=r"60 rows\b.*\b8 replicas"):
        verify_step(step, zoo.reference, zoo.only_params(), rows)


FILE = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax

def single(state, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - 0.1 * gradient, loss

def _update(state, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - 0.1 * lax.REDUCE(gradient, "data"), lax.pmean(loss, "data")

many = jax.pmap(_update, axis_name="data")
state = np.ones(3, np.float32)

def batch():
    return np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
"""


@pytest.mark.parametrize(("reduce", "ok"), [("pmean", True), ("psum", False)])
def test_files(folder: Path, reduce: str, ok: bool) -> None:
    path = folder / f"my_{reduce}.py"
    path.write_text(FILE.replace("REDUCE", reduce))
    assert verify_files(f"{path}:many", f"{path}:single", steps=1).ok == ok


def test_a_file_of_both_is_run_once(folder: Path) -> None:
    count = "with open('runs.txt', 'a') as runs:\n    runs.write('x')\n"
    (folder / "my_once.py").write_text(count + "def step(): ...\n")
    with pytest.raises(ConfigError, match="'state'"):
        verify_files("my_once.py:step", f"{folder}/my_once.py:step")
    assert (folder / "runs.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("my_steps.py", "write FILE.py:name"),
        ("nowhere.py:many", "nowhere.py"),
        ("my_steps.py:mony", "has no 'mony' (did you mean 'many'?)"),
    ],
)
def test_files_that_are_not_there(folder: Path, spec: str, words: str) -> None:
    (folder / "my_steps.py").write_text(FILE.replace("REDUCE", "pmean"))
    with refused(ConfigError, words):
        verify_files(spec, "my_steps.py:single")


def test_what_is_no_function_is_no_step(folder: Path) -> None:
    (folder / "my_value.py").write_text(FILE.replace("REDUCE", "pmean"))
    with pytest.raises(ConfigError, match=r"ndarray; .*\ba function"):
        verify_files("my_value.py:state", "my_value.py:single")
