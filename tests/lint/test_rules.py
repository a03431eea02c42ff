"""The rules that read code: each error at its line, and none in correct code."""

import re
from pathlib import Path

import pytest
from support import source_broken, source_correct, source_mended
from support.tiers import only

from replicax.lint.files import examine_file
from replicax.lint.step_file import step_file
from replicax.verify.step_files import verify_files

BROKEN = source_broken.BROKEN | source_mended.BROKEN
CORRECT = source_correct.CORRECT | source_mended.CORRECT
HEAD = """
import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from support.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
tx = optax.sgd(0.1)
draw = np.random.default_rng(0)
batch = {
    "x": draw.normal(size=(64, 3)).astype("float32"),
    "y": draw.normal(size=64).astype("float32"),
    "mask": (draw.uniform(size=64) < 0.6).astype("float32"),
}
x, y = batch["x"], batch["y"]
params = jnp.asarray(draw.normal(size=3), "float32")
opt_state = tx.init(params)
key = jax.random.key(0)


def apply_fn(variables, x, rngs=None):
    kept = 1.0 if rngs is None else jax.random.bernoulli(rngs["dropout"], 0.5, x.shape)
    return (x * kept) @ variables["params"]


state = TrainState(params, opt_state, apply_fn=apply_fn, tx=tx)


def loss_fn(params, batch):
    return ((batch["x"] @ params - batch["y"]) ** 2).mean()

"""
RULES = {
    "bad-call",
    "compiled-in-loop",
    "fetched-every-step",
    "frozen-value",
    "local-batch-norm",
    "local-scale",
    "mean-of-batches",
    "mean-of-means",
    "no-reduction",
    "rank-rule",
    "remainder",
    "removed-api",
    "shared-key",
}


def marked(code: str) -> set[tuple[int, str]]:
    lines = enumerate(code.splitlines(), 1)
    return {(line, match[1]) for line, text in lines if (match := re.search(r"#! (\S+)$", text))}


def found(folder: Path, code: str) -> set[tuple[int, str]]:
    path = folder / "program.py"
    path.write_text(code)
    return {(finding.line, finding.rule) for finding in examine_file(path).findings}


@pytest.mark.promise("lint.finds-classic-errors")
@pytest.mark.parametrize("name", BROKEN)
def test_each_error_is_found_where_it_is_and_no_other(name: str, tmp_path: Path) -> None:
    code = HEAD + BROKEN[name]
    assert found(tmp_path, code) == marked(code) != set()


@pytest.mark.promise("lint.finds-classic-errors")
@pytest.mark.parametrize("name", CORRECT)
def test_correct_code_gives_no_finding(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, HEAD + CORRECT[name]) == set()


def test_every_rule_has_a_program_with_its_error() -> None:
    assert {rule for code in BROKEN.values() for _, rule in marked(code)} == RULES


FULL, REPLICAS = ("parity", "full batch"), ("replicas", "8 replicas")
UNEQUAL, PADDED = ("parity", "unequal weights"), ("parity", "padded batch")
UNREDUCED = {FULL: ["never reduced"], REPLICAS: ["never reduced"]}
MEANS = {UNEQUAL: ["mean of means"], PADDED: ["replica 7", "0 by 0"]}
SAME_DRAWS = {FULL: ["random numbers", "fold"]}
OWN_ROWS = {FULL: ["one another"]}
EXECUTED = {
    "pmap without pmean": UNREDUCED,
    "only the loss is reduced": UNREDUCED,
    "written out SGD": UNREDUCED,
    "a gradient of a helper that forgets": UNREDUCED,
    "shard_map unchecked without pmean": UNREDUCED,
    "masked mean per device": MEANS,
    "masked mean, guarded, of a mask made of labels": OWN_ROWS,
    "masked means that go into an empty dict and a list": MEANS,
    "a key by in_axes None": SAME_DRAWS,
    "a key from a constant": OWN_ROWS,
    "a key by P() and the step": SAME_DRAWS,
    "a key by in_axes None, mended": {},
    "a key by P() and the step, mended": {},
    "pmap with pmean, every spelling": {},
    "reduced by a class of the file": {},
    "gradients summed, divided by the count": {},
    "shard_map, unchecked and checked": {},
    "metrics fetched every step, and now and then": {},
}
"""Complete programs: their first step runs as `verify --step` needs it, and a failing check
has these words in its cause."""
OFTEN = (
    "pmap without pmean",
    "a key by in_axes None",
    "masked mean per device",
    "gradients summed, divided by the count",
    "shard_map, unchecked and checked",
)


@pytest.mark.parametrize("name", only(OFTEN, EXECUTED))
def test_verify_agrees_once_it_runs(name: str, tmp_path: Path) -> None:
    code, to = HEAD + (BROKEN | CORRECT)[name], tmp_path / "check.py"
    to.write_text(step_file(code, Path("train.py"), to))
    verification = verify_files(f"{to}:step", f"{to}:reference")
    causes = {(check.subject, check.case): check.cause for check in verification.failed}
    assert len(causes) == len(verification.failed)
    assert verification.ok == (not EXECUTED[name])
    for case, words in EXECUTED[name].items():
        assert all(each in causes[case] for each in words), causes
