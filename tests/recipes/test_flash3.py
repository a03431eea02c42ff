"""FlashAttention-3, whose package is not here: its calls are traced, and none of them runs."""

import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.tiers import only

from replicax.core.ground.traced_for import traced_for
from replicax.core.jaxprs.linear import Linearity, linear_results
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_inner import derivative
from replicax.core.jaxprs.row_rules import MIXED, Rows
from replicax.errors import ConfigError, MissingDependencyError
from replicax.recipes import flash3, transformer
from replicax.recipes.gpt2 import GPT2

SHAPE = transformer.Shape(layers=1, heads=2, width=128, context=16, vocab_size=256)
SIZES = (8, 4)


def call(direction: str, *arrays: jax.Array, results: Any, **attributes: Any) -> Any:
    return jax.ffi.ffi_call(f"dew_flash3_mha_{direction}", results)(*arrays, **attributes)


def forward(q: Any, k: Any, v: Any, starts: Any, longest: Any, *rest: Any) -> Any:
    rows, tokens, heads, _ = q.shape
    scratch = [jax.ShapeDtypeStruct((1,) * dims, jnp.float32) for dims in (4, 3)]
    log_total = jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32)
    return call("fwd", q, k, v, results=(q, log_total, *scratch), is_causal=rest[1])[:2]


def backward(g: Any, q: Any, k: Any, v: Any, out: Any, log_total: Any, *rest: Any) -> Any:
    scratch = jax.ShapeDtypeStruct((q.shape[2] * q.shape[1] * (len(q) + 2),), jnp.float32)
    results = (q, k, v, scratch, scratch)
    return call("bwd", g, q, k, v, out, log_total, results=results, is_causal=rest[3])[:3]


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the package's two functions where it would be, with the calls of version 0.3.6."""
    package = types.ModuleType("dew_flash_attn")
    vars(package).update(_forward3=forward, _backward3=backward)
    monkeypatch.setitem(sys.modules, "dew_flash_attn", package)


def loss(remat: transformer.Remat, attention: transformer.Attention) -> Any:
    def of(params: Any, tokens: Any) -> Any:
        hidden = transformer.hidden(params, tokens, SHAPE.heads, remat, attention=attention)
        return hidden.astype(jnp.float32).sum()

    return of


def lowered(
    remat: transformer.Remat,
    attention: transformer.Attention = "fa3",
    capability: float | None = 9.0,
    dtype: Any = jnp.bfloat16,
) -> str:
    model = jax.eval_shape(partial(transformer.init, SHAPE), jax.random.key(0))
    model = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model)
    tokens = jax.ShapeDtypeStruct((3, SHAPE.context), jnp.int32)
    with traced_for(capability):
        traced = jax.jit(jax.grad(loss(remat, attention))).trace(model, tokens)
        text: str = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text


@pytest.mark.parametrize(
    ("remat", "forwards"), only([("selective", 1)], [("none", 1), ("selective", 1), ("full", 2)])
)
def test_both_passes_are_its_own_and_selective_keeps_its_results(
    remat: transformer.Remat, forwards: int
) -> None:
    text = lowered(remat)
    counts = [text.count(f"@dew_flash3_mha_{direction}(") for direction in ("fwd", "bwd")]
    assert counts == [forwards, 1]


def test_it_is_off_by_default() -> None:
    assert GPT2().attention == "cudnn"
    assert "dew_flash3" not in lowered("selective", "cudnn", capability=None)


def of_rows(function: Any) -> list[Any]:
    shapes = [[jax.ShapeDtypeStruct((n, 16, 2, 64), jnp.bfloat16)] * 3 for n in SIZES]
    one, two = (jax.make_jaxpr(function)(*each) for each in shapes)
    return Follow(SIZES)(one, two, [Rows(0)] * 3)


def test_its_rows_are_apart_forward_and_backward() -> None:
    def gradients(*arrays: jax.Array) -> Any:
        found, back = jax.vjp(flash3.flash3, *arrays)
        return found, *back(found)

    assert of_rows(gradients) == [Rows(0)] * 4
    assert of_rows(flash3.flash3) == [Rows(0)]
    mixed = lambda q, k, v: jax.ffi.ffi_call("another", q)(q, k, v)  # noqa: E731
    assert of_rows(mixed) == [MIXED]


def test_its_backward_pass_is_linear_as_the_trace_shows() -> None:
    array = jax.ShapeDtypeStruct((2, 16, 2, 64), jnp.bfloat16)
    [eqn] = jax.make_jaxpr(flash3.flash3)(array, array, array).eqns
    inputs = [Linearity.NONE] * 3 + [Linearity.LINEAR]
    assert linear_results(derivative(eqn), inputs)[1:] == [Linearity.LINEAR] * 3


@pytest.mark.parametrize(
    ("capability", "dtype", "named"),
    [
        (8.0, jnp.bfloat16, r"capability 8\.0"),
        (10.0, jnp.bfloat16, r"capability 10\.0"),
        ("attached", jnp.bfloat16, "'fa3' with no NVIDIA"),
        (9.0, jnp.float32, "float32"),
    ],
)
def test_another_device_or_dtype_is_refused(capability: Any, dtype: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        lowered("none", capability=capability, dtype=dtype)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"heads": 32}, "heads of 4;"),
        ({"heads": 1, "width": 264}, "heads of 264;"),
        ({"separate_documents": True}, "separate_documents"),
    ],
)
def test_what_it_cannot_compute_is_refused(settings: dict[str, Any], named: str) -> None:
    GPT2(**settings)
    with pytest.raises(ConfigError, match=named):
        GPT2(**settings, attention="fa3")


def test_without_its_package_or_cuda_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "dew_flash_attn", None)
    with pytest.raises(MissingDependencyError, match=r"dew_flash_attn .*\[flash3\]'"):
        lowered("none")
    monkeypatch.delitem(sys.modules, "dew_flash_attn")
    (tmp_path / "dew_flash_attn.py").write_text("raise OSError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"libcudart.so.13.*\[flash3\]'"):
        lowered("none")
