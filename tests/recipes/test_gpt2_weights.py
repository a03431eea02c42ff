"""Weights from a file: the network is GPT-2 as published, and a file of another one is refused."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from support.tiers import EXHAUSTIVE, only
from support.weight_files import HOW, saved

import replicax as rx
from replicax.errors import DataError
from replicax.recipes.transformer import GPT2_NAMES, Params, Shape, init, logits, published

SHAPE = Shape(layers=2, heads=1, width=4, context=8, vocab_size=11)
Tensors = dict[str, np.ndarray]


def load_weights(path: Path, shape: Shape) -> Params:
    return rx.load_weights(init(shape, jax.random.key(0)), path, rename=GPT2_NAMES)


@functools.cache
def a_network() -> Params:
    return init(SHAPE, jax.random.key(0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of `a_network`."""
    save_file(published(a_network()), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def change(path: Path, changed: Callable[[Tensors], Any]) -> None:
    """Write the file again, after `changed` had its tensors."""
    tensors = load_file(path)
    changed(tensors)
    save_file(tensors, path)


def assert_same(found: Params, expected: Params) -> None:
    for (place, leaf), wanted in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, wanted, err_msg=jax.tree_util.keystr(place))
    assert jax.tree.structure(found) == jax.tree.structure(expected)


@pytest.mark.parametrize("shape", only([SHAPE], [SHAPE, Shape(3, 2, 6, 5, 7)]))
def test_what_was_saved_is_loaded(shape: Shape, tmp_path: Path) -> None:
    params = init(shape, jax.random.key(1))
    save_file(published(params), tmp_path / "model.safetensors")
    assert_same(load_weights(tmp_path / "model.safetensors", shape), params)


def test_arrays_of_any_layout_are_saved_in_order(tmp_path: Path) -> None:
    columns_first = jax.tree.map(lambda leaf: np.asfortranarray(np.asarray(leaf)), a_network())
    save_file(published(columns_first), tmp_path / "model.safetensors")
    assert_same(load_weights(tmp_path / "model.safetensors", SHAPE), a_network())


def with_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"transformer.{name}"] = tensors.pop(name)


def with_output(tensors: Tensors) -> None:
    with_prefix(tensors)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]


def with_buffers(tensors: Tensors) -> None:
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = np.tri(8, dtype=bool)[None, None]
        tensors[f"h.{layer}.attn.masked_bias"] = np.float32([-1e4])


@pytest.mark.parametrize("changed", [with_prefix, with_output, with_buffers])
def test_what_exports_add_is_left_out(changed: Callable[[Tensors], None], path: Path) -> None:
    change(path, changed)
    assert_same(load_weights(path, SHAPE), a_network())


def other_output(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["wte.weight"] + 1


def without_the_embedding(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("wte.weight")


def of_twice_the_width(tensors: Tensors) -> None:
    tensors |= {name: np.repeat(each, 2, axis=-1) for name, each in tensors.items()}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (other_output, ["lm_head.weight", "wte.weight"]),
        (without_the_embedding, ["1 leaf ", "wte.weight;"]),
        (of_twice_the_width, ["28 tensors", "h.0.attn.c_attn.bias [24]", "takes [12]"]),
    ],
)
def test_another_networks_file_is_refused(
    changed: Callable[[Tensors], None], words: list[str], path: Path
) -> None:
    change(path, changed)
    with pytest.raises(DataError) as caught:
        load_weights(path, SHAPE)
    message = str(caught.value)
    assert message.startswith(f"{path}: {words[0]}")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 of torch", b"\xff" * 100, None])
def test_a_file_of_another_kind_is_an_error(content: bytes | None, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4] if content is None else content)
    with pytest.raises(DataError) as caught:
        load_weights(path, SHAPE)
    message = str(caught.value)
    assert message.startswith(f"{path} is not ")
    assert "); convert" in message
    assert "\n" not in message


@EXHAUSTIVE
def test_the_network_is_gpt2_as_published(tmp_path: Path) -> None:
    """Logits and gradients equal those of a widely used implementation."""
    torch = pytest.importorskip("torch", reason=HOW)
    transformers = pytest.importorskip("transformers", reason=HOW)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3,
        n_head=4,
        n_embd=32,
        n_positions=64,
        vocab_size=97,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    theirs = transformers.GPT2LMHeadModel(config)
    file = saved(theirs, tmp_path)
    tokens = np.random.default_rng(0).integers(0, 97, (5, 64))
    their_logits = theirs(torch.tensor(tokens)).logits
    their_loss = torch.nn.functional.cross_entropy(
        their_logits[:, :-1].reshape(-1, 97), torch.tensor(tokens[:, 1:]).reshape(-1)
    )
    their_loss.backward()

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        found = logits(params, tokens, heads=4)
        nats = optax.softmax_cross_entropy_with_integer_labels(found[:, :-1], tokens[:, 1:])
        return jnp.mean(nats), found

    params = load_weights(file, Shape(3, 4, 32, 64, 97))
    (value, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(found, their_logits.detach().numpy(), rtol=0, atol=1e-5)
    assert float(value) == pytest.approx(their_loss.item(), rel=1e-6)

    save_file(published(gradient), tmp_path / "gradient.safetensors")
    ours = load_file(tmp_path / "gradient.safetensors")
    for name, parameter in theirs.named_parameters():
        expected = parameter.grad.numpy()
        difference = np.abs(ours.pop(name.removeprefix("transformer.")) - expected).max()
        assert difference <= 1e-5 * np.abs(expected).max(), name
    assert not ours
