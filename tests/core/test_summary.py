"""`dp.summary`: what is in a state, of each kind of model, and what each device holds."""

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.core.state_summary import StateSummary

PAGE = Path(__file__).parents[2] / "docs/training.md"


class Network(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(12)])
        self.head = nnx.LoRALinear(4, 2, lora_rank=2, rngs=rngs)


def summary(model: Any, mesh: Any = None, **options: Any) -> StateSummary:
    dp = rx.DataParallel(lambda *_: None, optax.adam(1e-3), mesh=mesh, **options)
    return dp.summary(model)


def rows(found: StateSummary) -> list[tuple[Any, ...]]:
    return [
        (part.path, len(part.arrays), part.numbers, part.bytes, part.role) for part in found.parts
    ]


def test_layers_share_a_line_and_frozen_parts_have_no_optimizer_state() -> None:
    found = summary(Network(), trainable="lora")
    assert rows(found) == [
        ("head.bias", 1, 2, 8, "frozen"),
        ("head.kernel", 1, 8, 32, "frozen"),
        ("head.lora.lora_a", 1, 8, 32, "trained"),
        ("head.lora.lora_b", 1, 4, 16, "trained"),
        ("layers.*.bias", 12, 48, 192, "frozen"),
        ("layers.*.kernel", 12, 192, 768, "frozen"),
        ("norm.bias", 1, 4, 16, "frozen"),
        ("norm.scale", 1, 4, 16, "frozen"),
        ("norm.mean", 1, 4, 16, "state"),
        ("norm.var", 1, 4, 16, "state"),
    ]
    assert (found.parameters, found.trained, found.optimizer.numbers) == (270, 12, 25)
    lines = str(found).splitlines()
    assert "12 x float32[4, 4]" in lines[6]
    assert "270" in lines[11]
    assert max(map(len, lines)) <= 80


def test_each_device_has_its_part_of_stacked_layers() -> None:
    mesh = rx.make_mesh(model=2, stage=2)
    rules = [("weight", P("stage", None, "model")), ("", P("stage"))]
    shapes = {"weight": jnp.zeros((4, 8, 6)), "bias": jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)}
    found = summary(shapes, mesh, layout=rx.layout("zero1", rules=rules))
    assert rows(found) == [("bias", 1, 24, 24, "trained"), ("weight", 1, 192, 192, "trained")]
    assert [str(part).split(" over ") for part in found.parts] == [
        ["bfloat16[4, 6]", "stage"],
        ["float32[4, 8, 6]", "model, stage"],
    ]
    # Adam's moments are over two replicas, too, and its count is on each device.
    assert found.bytes_per_device == {
        "step": 4,
        "params": 24 + 192,
        "opt_state": 4 + 2 * (24 + 192) // 2,
        "seed": 4,
    }


@pytest.mark.parametrize("kind", ["linen", "equinox", "leaf"])
def test_so_are_models_of_other_kinds(kind: str) -> None:
    model: Any
    if kind == "linen":
        module = nn.BatchNorm(use_running_average=True)
        model = module.bind(module.init(jax.random.key(0), jnp.zeros((1, 3))))
        paths = ["bias", "scale", "batch_stats.mean", "batch_stats.var"]
    elif kind == "equinox":
        model, paths = eqx.nn.Linear(3, 1, key=jax.random.key(0)), ["weight", "bias"]
    else:
        model, paths = np.zeros(3, np.float32), ["model"]
    assert [part.path for part in summary(model).parts] == paths


def test_a_custom_step_says_itself_what_trains() -> None:
    dp = rx.DataParallel(step=lambda state, batch, key: (state, {}))
    found = dp.summary({"a": jnp.zeros(3), "key": jax.random.key(0)})
    assert rows(found) == [("a", 1, 3, 12, ""), ("key", 1, 1, 8, "")]
    assert (found.parameters, found.trained) == (4, 0)
    assert "total  4 numbers" in str(found)


def test_many_parts_become_few_and_a_notebook_shows_them() -> None:
    model = {name: {str(each): jnp.zeros(each) for each in range(1, 13)} for name in "ab"}
    found = summary(model)
    assert [(part.path, str(part)) for part in found.parts] == [
        ("a.*", "12 float32 arrays"),
        ("b.*", "12 float32 arrays"),
    ]
    assert "a.*" in found._repr_html_()


def test_the_page_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("### What is in a state")[2]
    program, shown = re.findall(r"^```(?:python|text)\n(.*?)^```", text, re.M | re.S)[:2]
    names = {"rx": rx, "jnp": jnp, "optax": optax, "nnx": nnx, "nnx_loss": lambda *_: None}
    exec(program, names)
    assert capsys.readouterr().out == shown
