"""Llama and ViT with weights that transformers saved: the same outputs, and the same bytes back."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from support import llama, vit
from support.llama import Llama, Sizes
from support.tiers import EXHAUSTIVE
from support.weight_files import HOW, assert_same_bytes, saved

import replicax as rx


@EXHAUSTIVE
def test_llama_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=HOW)
    transformers = pytest.importorskip("transformers", reason=HOW)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config)
    file = saved(theirs, tmp_path)
    tokens = np.random.default_rng(0).integers(0, 61, (3, 17))
    expected = theirs(torch.tensor(tokens)).logits.detach().numpy()

    shapes = nnx.eval_shape(lambda: Llama(Sizes(), nnx.Rngs(0)))
    ours = rx.load_weights(shapes, tmp_path, rename=llama.NAMES)
    np.testing.assert_allclose(ours(tokens), expected, rtol=0, atol=1e-5)
    rx.save_weights(ours, tmp_path / "again", rename=llama.NAMES)
    assert_same_bytes(tmp_path / "again", file)

    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    from_torch = rx.load_weights(shapes, tmp_path / "model.pt", rename=llama.NAMES)
    np.testing.assert_array_equal(from_torch(tokens), ours(tokens))

    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    file = tmp_path / "half" / "model.safetensors"
    half = rx.load_weights(shapes, file, rename=llama.NAMES)
    rx.save_weights(half, tmp_path / "again", rename=llama.NAMES, like=file)
    assert_same_bytes(tmp_path / "again", file)


@EXHAUSTIVE
def test_vit_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=HOW)
    transformers = pytest.importorskip("transformers", reason=HOW)
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
        attn_implementation="eager",
    )
    theirs = transformers.ViTForImageClassification(config)
    file = saved(theirs, tmp_path)
    images = np.random.default_rng(0).normal(size=(3, 16, 16, 3)).astype(np.float32)
    expected = theirs(torch.tensor(images.transpose(0, 3, 1, 2))).logits.detach().numpy()

    shapes = jax.eval_shape(lambda: vit.init(32, 48, 2, heads=4, patch=4, classes=5))
    ours = rx.load_weights(shapes, file, rename=vit.NAMES)
    np.testing.assert_allclose(vit.logits(ours, images), expected, rtol=0, atol=1e-5)
    rx.save_weights(ours, tmp_path / "again", rename=vit.NAMES)
    assert_same_bytes(tmp_path / "again", file)


def test_a_llama_with_a_tied_head_is_trained_and_written_back(tmp_path: Path) -> None:
    """A new model has the published names, and a file without `lm_head` fits the tied one."""
    model = Llama(Sizes(layers=1), nnx.Rngs(0))
    written = rx.save_weights(model, tmp_path / "model", rename=llama.NAMES)
    assert "model.layers.0.self_attn.k_proj.weight" in written
    tied = {**llama.NAMES, "lm_head.weight": rx.weights.tied("embed.embedding")}
    embedding = written["model.embed_tokens.weight"]
    save_file({**written, "lm_head.weight": embedding}, tmp_path / "model")
    loaded = rx.load_weights(model, tmp_path / "model", rename=tied, skip=["head.kernel"])
    np.testing.assert_array_equal(loaded.embed.embedding.get_value(), embedding)
    again = rx.save_weights(loaded, tmp_path / "again", rename=tied, skip=["head.kernel"])
    assert again.keys() == written.keys() - {"lm_head.weight"}
    save_file({**written, "lm_head.weight": embedding + 1}, tmp_path / "model")
    with pytest.raises(rx.errors.DataError, match=r"embed\.embedding"):
        rx.load_weights(model, tmp_path / "model", rename=tied, skip=["head.kernel"])
