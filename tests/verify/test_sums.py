"""Sums in 16-bit floats, for the devices at hand and for described ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from plan.compilers import FOLDER, needs
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.errors import CompilerError, ConfigError
from replicax.text.checks import Check
from replicax.verified import compiling_for
from replicax.verify.sums import Elsewhere, Text, check_sums, judged_sums, with_sums_as_cause

DEVICES, ROWS, CONTEXT, TOKENS, WIDTH = 8, 64, 128, 64, 16
BATCH = {"ids": jax.ShapeDtypeStruct((ROWS, CONTEXT), jnp.int32)}


def model() -> dict[str, jax.Array]:
    one, other = jax.random.split(jax.random.key(0))
    return {
        "table": jax.random.normal(one, (TOKENS, WIDTH)),
        "out": 0.1 * jax.random.normal(other, (WIDTH, TOKENS)),
        "bias": jnp.zeros(TOKENS),
    }


def loss(model: Any, batch: Any, key: Any) -> jax.Array:
    found = model["table"][batch["ids"]]
    return _errors(found @ model["out"] + model["bias"], batch)


def careful(model: Any, batch: Any, key: Any) -> jax.Array:
    table = model["table"]
    found = table.astype(jnp.float32)[batch["ids"]].astype(table.dtype)
    return _errors((found @ model["out"]).astype(jnp.float32) + model["bias"], batch)


def noisy(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Random draws keep mode `jit` from computing it replica by replica."""
    noise = jax.random.normal(key, (batch["ids"].shape[0], 1))
    return careful(model, batch, key) + 0 * noise[:, 0]


def _errors(scores: jax.Array, batch: Any) -> jax.Array:
    scores = scores.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["ids"]).mean(-1)


def parallel(of: Any, mode: str, precision: str = "bfloat16") -> rx.DataParallel:
    mesh = rx.make_mesh(DEVICES)
    return rx.DataParallel(of, optax.sgd(0.1), mode=mode, precision=precision, mesh=mesh)


def told(of: Any, mode: str, elsewhere: Elsewhere | None = None) -> list[Check]:
    return list(check_sums(parallel(of, mode), model(), BATCH, elsewhere))


@pytest.mark.promise("verify.sums-in-16-bits")
@pytest.mark.parametrize(("mode", "replicas"), [("jit", 1), ("shard_map", DEVICES)])
def test_a_lookup_and_a_bias_in_bfloat16(mode: str, replicas: int) -> None:
    lookup, bias = told(loss, mode)
    terms = ROWS * CONTEXT // replicas
    assert (lookup.subject, lookup.case, lookup.verdict) == ("sums", mode, "note")
    assert f"bf16[{TOKENS},{WIDTH}], up to {terms:,} terms" in lookup.found
    assert "test_sums.py:" in lookup.found
    assert "table.astype(float32)[ids]" in lookup.found
    assert f"bf16[{TOKENS}], {terms:,} terms" in bias.found
    assert lookup.figures["sums"][0]["terms"] == terms


def test_summed_in_float32_there_is_nothing_to_say() -> None:
    (only,) = told(careful, "jit")
    assert only.verdict == "pass"


def test_without_its_compiler_a_target_is_skipped_with_the_reason() -> None:
    reason = "libtpu is not installed"

    def refuse(*_: object) -> Text:
        raise CompilerError(reason)

    (only,) = told(loss, "jit", Elsewhere("v5e:2x4", refuse))
    assert (only.case, only.verdict, only.found) == ("jit, v5e:2x4", "skip", reason)


REDUCED = """HloModule jit_step, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

ENTRY %main (p: bf16[64,16]) -> bf16[64,16] {
  %p = bf16[64,16]{1,0} parameter(0)
  ROOT %all = bf16[64,16]{1,0} all-reduce(%p), replica_groups=GROUPS, to_apply=%add
}
"""


def test_reductions_between_replicas_and_not_inside_of_one() -> None:
    whole, halves = "{{0,1,2,3,4,5,6,7}}", "{{0,1},{2,3},{4,5},{6,7}}"
    sizes = {"data": 4, "model": 2}
    dp = parallel(loss, "jit")
    (found,) = judged_sums("jit", Text(REDUCED.replace("GROUPS", whole), sizes), dp)
    assert found.verdict == "note"
    assert "use mode='shard_map'" in found.found
    assert "bf16[64,16], 8 devices" in found.found
    (found,) = judged_sums("jit", Text(REDUCED.replace("GROUPS", halves), sizes), dp)
    assert found.verdict == "pass"


def test_they_are_the_likely_cause_where_no_other_fits() -> None:
    failed = Check("parity", "jit, full", "fail", "", "no known cause fits: no factor")
    known = Check("parity", "jit, padded", "fail", "", "mean of means")
    note = Check("sums", "jit", "note", "")
    assert with_sums_as_cause(failed, list) == failed
    assert re.match(r"likely\b.*\b16", with_sums_as_cause(failed, lambda: [note]).cause)
    assert with_sums_as_cause(known, lambda: [note]) == known


def test_an_unknown_target_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="h1000"):
        rx.verify(parallel(loss, "jit"), model(), {}, target="h1000:8")


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Eight of them, as their compiler describes them."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    return compiling_for("h100:8", print)


@EXHAUSTIVE
@needs("cuda")
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_an_h100_does_both(mode: str, h100: Elsewhere) -> None:
    lookup, bias = told(loss, mode, h100)
    terms = ROWS * CONTEXT // DEVICES
    assert f"up to {terms:,} terms (" in lookup.found
    assert f", {terms:,} terms (" in bias.found
    assert {lookup.verdict, bias.verdict} == {"note"}
    assert [each.verdict for each in told(careful, mode, h100)] == ["pass"]


@EXHAUSTIVE
@needs("cuda")
def test_an_h100_reduces_what_the_partitioner_does(h100: Elsewhere) -> None:
    (found,) = told(noisy, "jit", h100)
    assert found.found.startswith("reductions between")
    assert "in bfloat16" in found.found
    assert [each.verdict for each in told(noisy, "shard_map", h100)] == ["pass"]


@EXHAUSTIVE
@needs("cuda")
@pytest.mark.parametrize("mode", ["jit", "shard_map", "exact"])
def test_gpt2_on_an_h100_has_none(mode: str) -> None:
    """Runs in a process with cuDNN on its path: JAX looks for it while it traces."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "PYTHONPATH": str(FOLDER),
    }
    command = [sys.executable, str(Path(__file__).with_name("sums_step.py")), mode]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(ended.stdout.splitlines()[-1])
    assert found["verdict"] == "pass", found["found"]
