"""The rules that read code: each error where it is, and nothing in correct code."""

import re
from pathlib import Path

import pytest
from support.source_broken import BROKEN
from support.source_correct import CORRECT

from replicax.lint.files import examine

HEAD = """
import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",))
tx = optax.sgd(0.1)


def loss_fn(params, batch):
    logits = batch["x"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

"""
RULES = {
    "bad-call",
    "compiled-in-loop",
    "fetched-every-step",
    "frozen-value",
    "local-batch-norm",
    "local-scale",
    "mean-of-means",
    "no-reduction",
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
    return {(finding.line, finding.rule) for finding in examine(path).findings}


@pytest.mark.parametrize("name", BROKEN)
def test_each_error_is_found_where_it_is_and_no_other(name: str, tmp_path: Path) -> None:
    code = HEAD + BROKEN[name]
    assert found(tmp_path, code) == marked(code) != set()


@pytest.mark.parametrize("name", CORRECT)
def test_correct_code_gives_no_finding(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, HEAD + CORRECT[name]) == set()


def test_every_rule_has_a_program_with_its_error() -> None:
    assert {rule for code in BROKEN.values() for _, rule in marked(code)} == RULES
