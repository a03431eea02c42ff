"""`replicax verify` as a command."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Main

from replicax.cli import step_options
from replicax.verify import step_files
from replicax.verify.verification import Verification

BROKEN = """
import dataclasses
import jax.numpy as jnp
from replicax.recipes.linear_regression import LinearRegression

@dataclasses.dataclass(frozen=True)
class Summed(LinearRegression):
    "A loss that nobody divided."

    def loss(self, model, batch, key):
        return jnp.sum(super().loss(model, batch, key))
"""
STEP = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

def reference(state, batch):
    error, slope = jax.value_and_grad(lambda w: jnp.mean((w * batch["x"] - 1) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * slope}, {"loss": error}

def doubled(state, batch):
    after, metrics = reference(state, batch)
    return {"w": state["w"] + 2 * (after["w"] - state["w"])}, metrics

mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
whole, rows = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("data",)))
step = jax.jit(reference, in_shardings=(whole, rows), out_shardings=whole)
wrong = jax.jit(doubled, in_shardings=(whole, rows), out_shardings=whole)

state = {"w": jnp.float32(1)}
batch = {"x": jnp.arange(1, 17, dtype=jnp.float32)}
"""


UNKEYED = """
import jax
import numpy as np
from replicax.recipes.linear_regression import LinearRegression

class Unkeyed(LinearRegression):
    "Weights that do not follow from the key."

    def model(self, key):
        made = super().model(key)
        return jax.tree.map(lambda leaf: leaf + np.random.rand(), made)

class NeedsKey(LinearRegression):
    "A loss that splits its key in evaluation too."

    def loss(self, model, batch, key):
        jax.random.split(key)
        return super().loss(model, batch, key)

class OnlyTrained(NeedsKey):
    "The same, never evaluated."

    def eval_source(self):
        return None
"""


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("Unkeyed", ("determinism", "two models")),
        ("NeedsKey", ("parity", "evaluation")),
        ("OnlyTrained", None),
    ],
)
def test_what_only_a_recipe_tells(main: Main, recipe: str, row: tuple[str, str] | None) -> None:
    Path("my_unkeyed.py").write_text(UNKEYED)
    spec = f"my_unkeyed.py:{recipe}"
    code, out, _ = main("verify", spec, "--devices", 2, "--json")
    found = json.loads(out)
    failed = [each for each in found["checks"] if each["verdict"] == "fail"]
    assert (found["about"]["modes"], len(found["about"]["other_modes"])) == (["jit"], 4)
    assert [(each["subject"], each["case"]) for each in failed] == ([row] if row else [])
    assert code == len(failed)


@pytest.mark.promise("verify.exit-code")
def test_a_broken_recipe_ends_with_1_and_json_alone(main: Main) -> None:
    Path("my_recipe.py").write_text(BROKEN)
    code, out, _ = main(
        "verify", "my_recipe.py:Summed", "--devices", 2, "--modes", "shard_map", "--json"
    )
    assert code == 1
    found: dict[str, Any] = json.loads(out)
    assert not found["ok"]
    assert any("a sum" in check["cause"] for check in found["checks"])


@pytest.mark.promise("verify.exit-code")
@pytest.mark.parametrize(("name", "code"), [("step", 0), ("wrong", 1)])
def test_a_step_by_hand(main: Main, name: str, code: int) -> None:
    Path("my_step.py").write_text(STEP)
    found, out, _ = main(
        "verify", "--step", f"my_step.py:{name}", "--reference", "my_step.py:reference"
    )
    assert found == code, out


def test_the_flags_of_a_step_reach_it(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def verify_files(**options: Any) -> Verification:
        given.update(options)
        return Verification([])

    monkeypatch.setattr(step_files, "verify_files", verify_files)
    flags = ("--weights", "scale", "--replicas", 4, "--steps", 3, "--micro-batches", 5)
    code, _, err = main("verify", "--step", "a.py:f", "--reference", "a.py:g", *flags)
    assert code == 0, err
    assert callable(given.pop("show"))
    assert given == {
        "step": "a.py:f",
        "reference": "a.py:g",
        "state": "state",
        "batch": "batch",
        "weights": "scale",
        "replicas": 4,
        "steps": 3,
        "micro_batches": 5,
    }


def test_exact_gets_its_threads(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(step_options, "fix_threads", asked.append)
    flags = ("--devices", 2, "--mode", "exact", "--modes", "exact", "--micro-shards", 16)
    code, _, err = main("verify", "linear_regression", *flags)
    assert asked == [16]
    assert code == 2  # the tests have 8 threads
    assert "micro_shards=16" in err
