"""Weights by a table of names: each rule both ways, each kind of model, and what does not fit."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from support.tiers import EXHAUSTIVE
from support.weight_files import assert_same_bytes

import replicax as rx
from replicax.errors import ConfigError, DataError

Tensors = dict[str, np.ndarray]


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def by_hand(tensors: Tensors) -> dict[str, Any]:
    """Return what each rule of `RENAME` stands for, written with NumPy."""
    t = tensors
    return {
        "linear": {"kernel": t["linear.weight"].T, "bias": t["linear.bias"]},
        "conv": t["conv.weight"].transpose(2, 3, 1, 0),
        "heads": t["q.weight"].reshape(2, 3, 4).transpose(2, 0, 1),
        "merged": t["out.weight"].transpose(0, 2, 1).reshape(4, 6),
        "blocks": {
            "kernel": np.stack([t[f"blocks.{n}.weight"].T for n in range(3)]),
            "experts": np.stack(
                [np.stack([t[f"blocks.{n}.expert.{e}.weight"] for n in range(3)]) for e in range(2)]
            ),
            "qkv": np.stack(
                [
                    np.concatenate([t[f"blocks.{n}.{part}.weight"].T for part in "qkv"], axis=1)
                    for n in range(3)
                ]
            ),
        },
        **dict(zip("abc", np.split(t["abc.weight"], [2, 3]), strict=True)),
        "scale": t["scale"],
    }


RENAME = {
    "linear.weight": rx.weights.transposed("linear.kernel"),
    "conv.weight": rx.weights.transposed("conv", (2, 3, 1, 0)),
    "q.weight": rx.weights.rearranged("heads", "(heads dim) width -> width heads dim"),
    "out.weight": rx.weights.rearranged("merged", "a b c -> a (c b)", b=2, c=3),
    r"blocks\.(\d+)\.weight": rx.weights.transposed(rx.weights.stacked("blocks.kernel")),
    r"blocks.(\d+).expert.(\d+).weight": rx.weights.stacked(
        rx.weights.stacked("blocks.experts", 2), 1
    ),
    **{
        rf"blocks.(\d+).{part}.weight": rx.weights.transposed(
            rx.weights.part(rx.weights.stacked("blocks.qkv"), number, (4, 2, 2))
        )
        for number, part in enumerate("qkv")
    },
    "abc.weight": rx.weights.split("a", "b", "c"),
    "lm_head.weight": rx.weights.tied("linear.bias"),
    r"linear\.(bias|unused)": r"linear.\1",
}


def tensors_of_rules() -> Tensors:
    blocks = {
        f"blocks.{n}.{part}weight": numbers(rows, 4) + n
        for n in range(3)
        for part, rows in {"": 5, "q.": 8, "k.": 4, "v.": 4}.items()
    }
    experts = {
        f"blocks.{n}.expert.{e}.weight": numbers(2, 3) + 10 * n + e
        for n in range(3)
        for e in range(2)
    }
    others = {
        "linear.weight": numbers(3, 4),
        "linear.bias": numbers(3),
        "conv.weight": numbers(5, 4, 3, 2),
        "q.weight": numbers(6, 4),
        "out.weight": numbers(4, 2, 3),
        "abc.weight": numbers(7, 2),
        "scale": numbers(),
    }
    return {**others, **blocks, **experts}


@pytest.mark.promise("home.weights-both-ways")
def test_each_rule_both_ways(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tensors_of_rules()
    save_file(tensors, path)
    expected = by_hand(tensors)
    model = jax.tree.map(jnp.zeros_like, expected)
    loaded = rx.load_weights(model, path, rename=RENAME)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    assert not jax.tree.reduce(jnp.logical_or, jax.tree.map(jnp.any, model))
    said = " ".join(capsys.readouterr().out.split())
    assert f"{len(tensors)} tensors fill {len(jax.tree.leaves(model))} leaves" in said

    written = rx.save_weights(loaded, path.with_name("again"), rename=RENAME)
    assert written.keys() == tensors.keys()
    assert_same_bytes(path.with_name("again"), path)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))


def linen(key: jax.Array) -> Any:
    net = LinenNet()
    return net.bind(net.init(key, jnp.ones((1, 3))))


KINDS: dict[str, tuple[Callable[[jax.Array], Any], str]] = {
    "nnx": (lambda key: Net(nnx.Rngs(key)), "layers.1.kernel norm.var"),
    "equinox": (lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key), "layers.1.weight"),
    "linen": (linen, "Dense_0.kernel batch_stats.BatchNorm_0.var"),
    "pytree": (lambda key: [{"w": jax.random.normal(key, (3,)), "count": jnp.int32(3)}], "0.w"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_by_its_own_paths(kind: str, path: Path) -> None:
    make, names = KINDS[kind]
    saved, other = (make(jax.random.key(seed)) for seed in (0, 1))
    written = rx.save_weights(saved, path)
    assert set(names.split()) <= written.keys()
    assert not [name for name, each in written.items() if each.dtype != np.float32]
    loaded = rx.load_weights(other, path)
    assert type(loaded) is type(other)
    rx.save_weights(loaded, path.with_name("again"))
    assert_same_bytes(path.with_name("again"), path)
    assert any((rx.save_weights(other, path)[name] != each).any() for name, each in written.items())


def test_narrow_floats_come_back_and_what_the_format_lacks_is_refused(path: Path) -> None:
    kinds = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    made = {kind: np.arange(1, 7).reshape(2, 3).astype(jnp.dtype(kind)) for kind in kinds}
    model = made | {"w": np.ones(5, np.float32)}
    rx.save_weights(model, path)
    zeros = jax.tree.map(np.zeros_like, model)
    jax.tree.map(np.testing.assert_array_equal, rx.load_weights(zeros, path), model)
    with pytest.raises(DataError, match=r"'?w'? is .*float8_e4m3\b"):
        rx.save_weights({"w": jnp.ones(3, jnp.float8_e4m3)}, path)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.npz"])
def test_a_file_under_the_name_of_another_format_is_not_written(name: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write model\.safetensors"):
        rx.save_weights({"w": jnp.ones(3)}, path.with_name(name))
    assert not path.with_name(name).exists()


def test_a_pointer_of_git_lfs_is_named(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(DataError, match="lfs"):
        rx.load_weights({"w": jnp.ones(3)}, path)


def test_a_half_is_loaded_exactly_and_written_back_in_its_bits(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = {
        "a": numbers(3, dtype=ml_dtypes.bfloat16),
        "b": numbers(2, dtype=np.float16),
        "c": numbers(4),
        "mask": np.array([True, False]),
    }
    save_file(file, path)
    model = {name: jnp.zeros(each.shape) for name, each in file.items() if name != "mask"}
    loaded = rx.load_weights(model, path, rename={"mask": None})
    said = " ".join(capsys.readouterr().out.split())
    for words in ("1 from bfloat16 to float32", "1 from float16", "left out: mask"):
        assert words in said
    np.testing.assert_array_equal(loaded["a"], file["a"].astype(np.float32))
    rx.save_weights(loaded, path.with_name("again"), rename={"mask": None}, like=path)
    assert_same_bytes(path.with_name("again"), path)


def test_numbers_are_rounded_on_request_only(path: Path) -> None:
    save_file({"a": numbers(3)}, path)
    model = {"a": jnp.zeros(3, jnp.bfloat16)}
    with pytest.raises(DataError, match="float32 to bfloat16"):
        rx.load_weights(model, path)
    found = rx.load_weights(model, path, cast=True)["a"]
    np.testing.assert_array_equal(found, numbers(3).astype(ml_dtypes.bfloat16))


def test_what_is_skipped_stays_in_the_model(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"body": numbers(3), "head": numbers(5), "extra": numbers(1)}, path)
    model = {"body": jnp.zeros(3), "head": jnp.ones(2)}
    loaded = rx.load_weights(model, path, skip=["head", "ext.*"])
    np.testing.assert_array_equal(loaded["body"], numbers(3))
    np.testing.assert_array_equal(loaded["head"], [1, 1])
    said = " ".join(capsys.readouterr().out.split())
    assert "left out: extra, head" in said
    assert "not loaded: head" in said
    assert rx.save_weights(loaded, path.with_name("again"), skip=["head"]).keys() == {"body"}


def test_leaves_stay_on_their_devices(path: Path) -> None:
    save_file({"sharded": numbers(4, 2), "shapes": numbers(3), "host": numbers(1)}, path)
    places = NamedSharding(rx.make_mesh(2), P("data"))
    model = {
        "sharded": jax.device_put(jnp.zeros((4, 2)), places),
        "shapes": jax.ShapeDtypeStruct((3,), jnp.float32),
        "host": np.zeros(1, np.float32),
    }
    loaded = rx.load_weights(model, path)
    assert loaded["sharded"].sharding == places
    assert isinstance(loaded["shapes"], jax.Array)
    assert type(loaded["host"]) is np.ndarray
    for name, each in loaded.items():
        np.testing.assert_array_equal(each, load_file(path)[name])


@pytest.mark.parametrize("asked", ["folder", "index"])
def test_a_model_in_several_files(asked: str, tmp_path: Path) -> None:
    parts = {"1": {"a": numbers(3)}, "2": {"b": numbers(2)}}
    for name, tensors in parts.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    files = {tensor: f"{name}.safetensors" for name, part in parts.items() for tensor in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    model = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    loaded = rx.load_weights(model, tmp_path if asked == "folder" else index)
    np.testing.assert_array_equal(loaded["a"], numbers(3))
    np.testing.assert_array_equal(loaded["b"], numbers(2))
    for damaged in ("{}", "[" * 100_000):
        index.write_text(damaged)
        with pytest.raises(DataError, match="weight_map"):
            rx.load_weights(model, index)
    os.mkfifo(tmp_path / "pipe")
    outside = tmp_path / "in/model.safetensors.index.json"
    outside.parent.mkdir()
    for path, name in [
        *((index, name) for name in ("pipe", "gone", 5)),
        *((outside, name) for name in ("../1.safetensors", str(tmp_path / "1.safetensors"))),
    ]:
        path.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(DataError, match="weight_map" if name == 5 else str(name)):
            rx.load_weights(model, path)


def test_a_checkpoint_of_orbax(tmp_path: Path) -> None:
    dp = rx.DataParallel(lambda model, batch, key: (model["w"] * batch).sum(1), optax.sgd(0.1))
    saved = {"w": jnp.asarray(numbers(3))}
    rx.fit(dp, dp.init(saved), np.ones((8, 3), np.float32), batch_size=8, steps=1, run_dir=tmp_path)
    loaded = rx.load_weights({"kernel": jnp.zeros(3)}, tmp_path, rename={"w": "kernel"})
    np.testing.assert_allclose(loaded["kernel"], numbers(3) - 0.1, rtol=1e-6)


STACK = rx.weights.stacked("a")


@pytest.mark.parametrize(
    ("tensors", "rename", "words"),
    [
        ({}, {}, ["2 leaves", "a, b;"]),
        ({"a": (3, 2), "b": (3,)}, {}, ["1 tensor ", "b [3]", "b takes [2]"]),
        ({"a": (3, 2), "b": (2,), "c": (1,), "d": (1,)}, {}, ["2 tensors", "c, d;"]),
        ({"a": (3, 2), "b": (2,), "c": (1,)}, {"c": "x.y"}, ["1 tensor ", "c (to x.y)"]),
        ({"a.0": (2,), "a.2": (2,), "b": (2,)}, {r"a.(\d)": STACK}, ["a (4 of 6 numbers)"]),
        ({"a.0": (2,), "a.3": (2,), "b": (2,)}, {r"a.(\d)": STACK}, ["3 entries", "'3'"]),
        ({"a.x": (2,), "b": (2,)}, {"a.(.)": STACK}, ["3 entries", "'x'"]),
        ({"a": (3, 2), "A": (3, 2), "b": (2,)}, {"A": "a"}, ["a (12 of 6 numbers)"]),
        (
            {"a": (3, 2), "B": (2,)},
            {"B": rx.weights.part("b", 0, (2, 1))},
            ["B [2]", "dim of 2", "multiple of 3"],
        ),
        ({"a": (3, 2), "b": (2,)}, {"b": rx.weights.stacked("b", 1, 2)}, ["1 dims", "axis 2"]),
        (
            {"a": (3, 2), "b": (2,)},
            {"a": rx.weights.rearranged("a", "x -> x")},
            ["2 dims, not 1 as in x -> x"],
        ),
        ({"a": (3, 2), "t": (2,), "b": (2,)}, {"t": rx.weights.tied("b")}, []),
    ],
)
def test_what_does_not_fit_is_told_by_kind(
    tensors: dict[str, tuple[int, ...]], rename: Any, words: list[str], path: Path
) -> None:
    save_file({name: numbers(*shape) for name, shape in tensors.items()}, path)
    model = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    if not words:
        rx.load_weights(model, path, rename=rename)
        return
    with pytest.raises(DataError) as caught:
        rx.load_weights(model, path, rename=rename)
    for line in str(caught.value).splitlines():
        assert line.startswith(f"{path}: ")
    for word in words:
        assert word in str(caught.value)


def test_several_kinds_are_several_lines(path: Path) -> None:
    names = {f"layer.{number}": numbers(1) for number in range(5)}
    save_file({**names, "b": numbers(3)}, path)
    with pytest.raises(DataError) as caught:
        rx.load_weights({"a": jnp.zeros(2), "b": jnp.zeros(2)}, path)
    first, second, third = str(caught.value).splitlines()
    assert "5 tensors" in first
    assert "layer.0, layer.1, layer.2 and 2 more" in first
    assert "1 leaf " in second
    assert "b [3]" in third


@pytest.mark.parametrize(
    ("rename", "words"),
    [({"(": "a"}, ["'('", "pattern"]), ({"(a|b)": r"\2"}, ["group 2", "has 1"])],
)
def test_a_rule_that_cannot_be_used(rename: Any, words: list[str], path: Path) -> None:
    save_file({"a": numbers(2)}, path)
    with pytest.raises(ConfigError) as caught:
        rx.load_weights({"a": jnp.zeros(2)}, path, rename=rename)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("pattern", [r"a\d?", "(?:x)?a", "(a)(b)?", "a|c"])
def test_a_pattern_of_several_names_is_read_and_not_written(pattern: str, path: Path) -> None:
    save_file({"a": numbers(2)}, path)
    loaded = rx.load_weights({"x": jnp.zeros(2)}, path, rename={pattern: "x"})
    with pytest.raises(ConfigError, match=re.escape(repr(pattern))):
        rx.save_weights(loaded, path.with_name("again"), rename={pattern: "x"})
    rx.save_weights(loaded, path.with_name("again"), rename={pattern: "x"}, like=path)
    assert_same_bytes(path.with_name("again"), path)


def test_what_would_be_written_in_part_is_refused(path: Path) -> None:
    model = {"a": jnp.zeros(4), "b": jnp.zeros(1)}
    with pytest.raises(DataError, match=re.escape("1 of ")):
        rx.save_weights(model, path, rename={"first": rx.weights.part("a", 0, (1, 1))})
    assert not path.exists()


@pytest.mark.parametrize("pattern", ["a b -> a", "a a -> a a", "a b -> (a b)"])
def test_a_pattern_of_dims_that_says_too_little(pattern: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(pattern))):
        rx.weights.rearranged("x", pattern)


@EXHAUSTIVE
def test_files_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="no torch to write with: `make peers` installs it")
    tensors = {
        "a": torch.randn(3, 2).T,
        "half": torch.randn(4).to(torch.bfloat16),
        "scalar": torch.tensor(2.0),
    }
    model = {"a": jnp.zeros((2, 3)), "half": jnp.zeros(4), "scalar": jnp.zeros(())}
    torch.save(tensors, tmp_path / "model.pt")
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "nested.bin")
    torch.save(tensors, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name, rename in (
        ("model.pt", {}),
        ("nested.bin", {r"model\.(.*)": r"\1"}),
        ("old.pth", {}),
    ):
        loaded = rx.load_weights(model, tmp_path / name, rename=rename)
        for leaf, tensor in tensors.items():
            np.testing.assert_array_equal(loaded[leaf], tensor.float().numpy())
    (tmp_path / "model.pt").write_bytes(b"not of torch")
    with pytest.raises(DataError, match=re.escape("model.pt")):
        rx.load_weights(model, tmp_path / "model.pt")
