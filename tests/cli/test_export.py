"""`replicax export`: parameters to the bit, under others' names; predictions as programs."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from support.command_line import Main, refusal
from support.recipe_runs import MLP, Ended, train
from support.stablehlo import called_alone
from support.tiers import EXHAUSTIVE
from support.weight_files import HOW

import replicax as rx
from replicax.core.models.training_mode import for_inference
from replicax.recipes import transformer
from replicax.recipes.cnn import CNN
from replicax.recipes.lenet import LeNet

MINE = (2).to_bytes(8, "little") + b"{}"
"""A file of no tensors."""


def test_a_run_begins_with_weights_from_a_file(
    main: Main, there: dict[str, Ended], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, wanted = folder / "mlp.safetensors", there["mlp"].result.state.params
    assert main("export", "mlp", file)[0] == 0
    monkeypatch.chdir(folder)
    begun = train("begun", *MLP, "--learning-rate", "0", "--steps", "1", "--init-from", file)
    jax.tree.map(np.testing.assert_array_equal, begun.result.state.params, wanted)


def test_statistics_are_exported_and_counters_are_not(main: Main, folder: Path) -> None:
    (folder / "my_batchnorm.py").write_text(BATCH_NORM)
    ended = train("it", "my_batchnorm.py:Normed", "--epochs", "1")
    assert main("export", "it", "it.safetensors", "--recipe", "my_batchnorm.py")[0] == 0
    found = load_file(folder / "it.safetensors")
    assert set(found) == {
        "linear.bias",
        "linear.kernel",
        "norm.bias",
        "norm.scale",
        "norm.mean",
        "norm.var",
    }
    np.testing.assert_array_equal(found["norm.mean"], ended.result.state.extras["norm"]["mean"])
    assert found["norm.mean"].any()


BATCH_NORM = """
import dataclasses
import jax.numpy as jnp
from flax import nnx
from replicax.recipes.linear_regression import LinearRegression

class Network(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(1, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x[:, None])))[:, 0]

@dataclasses.dataclass(frozen=True)
class Normed(LinearRegression):
    "A line through BatchNorm."
    points: int = 64

    def model(self, key):
        return Network(nnx.Rngs(key))

    def loss(self, model, batch, key):
        return (model(batch["x"] + 1) - batch["y"]) ** 2
"""


def test_a_run_of_ones_own_program_is_exported_with_its_model(main: Main, folder: Path) -> None:
    (folder / "mine.py").write_text(MINE_PY)
    loss = lambda model, batch, key: (batch["x"] @ model["w"]) ** 2  # noqa: E731
    dp = rx.DataParallel(loss, optax.sgd(0.1))
    rows = {"x": np.ones((8, 3), np.float32)}
    begun = dp.init({"w": np.ones(3, np.float32)})
    result = rx.fit(dp, begun, rows, batch_size=8, epochs=1, run_dir="runs/own", progress=False)
    for name in ("made", "given"):
        assert main("export", "own", f"{name}.safetensors", "--model", f"mine.py:{name}")[0] == 0
        found = load_file(folder / f"{name}.safetensors")
        np.testing.assert_array_equal(found["w"], result.state.params["w"])
    for command, said in (
        (["export", "own", "it.safetensors"], "--model FILE.py:name"),
        (["export", "own", "it.safetensors", "--model", "mine.py:Made"], "mine.py:Made"),
        (["export", "own", "it.safetensors", "--model", "mine.py:nade"], "'made'"),
        (["sample", "own", "text"], "rx.load_model(run_dir, model)"),
        (["evaluate", "own"], "dp.evaluate(rx.load("),
    ):
        assert said in refusal(main, *command)


MINE_PY = """
import numpy as np

given = {"w": np.zeros(3, np.float32)}

def made():
    return given

class Made:
    pass
"""


def test_a_prediction_is_a_program_for_any_number_of_rows(
    main: Main, there: dict[str, Ended], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = folder / "predict.stablehlo", rx.load(there["mlp"].folder)
    assert main("export", "mlp", file)[0] == 0
    found = jax.export.deserialize(bytearray(file.read_bytes()))
    assert (found.platforms, found.nr_devices) == (("cpu", "cuda", "tpu"), 1)
    rows = run.recipe.eval_source()["x"][:5]
    np.testing.assert_allclose(found.call(rows), run.model(rows), rtol=1e-5, atol=1e-6)
    file.write_bytes(MINE)
    assert "--force" in refusal(main, "export", "mlp", file, "--force")
    assert file.read_bytes() == MINE
    file.unlink()
    said = refusal(main, "export", "mlp", file, "--model", "it.py:model")
    assert "docs/checkpoints.md" in said
    monkeypatch.setattr("replicax.cli.export.LARGEST_FILE", 1000)
    assert "1 kB" in refusal(main, "export", "mlp", file)


def test_a_recipe_says_what_its_model_takes(main: Main, folder: Path) -> None:
    (folder / "silent.py").write_text(SILENT)
    train("it", "silent.py", "--epochs", "1")
    said = refusal(main, "export", "it", "it.stablehlo", "--recipe", "silent.py")
    assert "Silent" in said
    assert "docs/checkpoints.md" in said


SILENT = """
import dataclasses
from replicax.recipes.linear_regression import LinearRegression

@dataclasses.dataclass(frozen=True)
class Silent(LinearRegression):
    "A line of which nobody asks anything."

    prediction = property()
"""


@EXHAUSTIVE
@pytest.mark.parametrize("recipe", [LeNet(), CNN(dropout=0)])
def test_images_are_predicted_as_in_the_loss(recipe: Any) -> None:
    (function, row), model = recipe.prediction(), for_inference(recipe.model(jax.random.key(0)))
    images = np.random.default_rng(0).integers(0, 255, (3, *row.shape)).astype(row.dtype)
    batch = {"image": images, "label": np.argmax(function(model, images), axis=1)}
    assert np.all(recipe.loss(model, batch, None)[1]["accuracy"])
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("rows"), *row.shape), row.dtype)
    exported = jax.export.export(jax.jit(lambda images: function(model, images)))(rows)
    assert exported.out_avals[0].shape[1:] == (10,)


@EXHAUSTIVE
def test_it_runs_where_there_is_neither_replicax_nor_flax(
    main: Main, there: dict[str, Ended], folder: Path
) -> None:
    run = rx.load(there["gpt2"].folder)
    assert main("export", "gpt2", folder / "it.stablehlo")[0] == 0
    tokens = np.random.default_rng(0).integers(0, 257, (3, 16), np.int32)
    wanted = transformer.logits(run.model, tokens, run.recipe.heads)
    found = called_alone(folder / "it.stablehlo", tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_file_is_not_overwritten_without_force(
    main: Main, there: dict[str, Ended], folder: Path
) -> None:
    file, name = folder / "model.safetensors", there["mlp"].folder.name
    file.write_bytes(MINE)
    assert "--force" in refusal(main, "export", name, file)
    assert file.read_bytes() == MINE
    assert main("export", name, file, "--force", "--step", "3")[0] == 0
    first = load_file(file)
    assert main("export", name, file, "--force")[0] == 0
    assert any((load_file(file)[leaf] != array).any() for leaf, array in first.items())


@pytest.mark.promise("outside.no-harm-by-a-folder")
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "program"])
def test_only_a_regular_file_is_overwritten(
    kind: str, main: Main, there: dict[str, Ended], folder: Path
) -> None:
    file, other = folder / "model.safetensors", folder / "other"
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "program":
        file.write_text("print('mine')\n")
    else:
        file.symlink_to(other)
    if kind == "link":
        other.write_text("mine")
    before = os.lstat(file)
    assert str(file) in refusal(main, "export", there["mlp"].folder.name, file, "--force")
    assert os.path.samestat(before, os.lstat(file))
    assert kind != "link" or other.read_text() == "mine"


@EXHAUSTIVE
def test_transformers_reads_it_and_gives_the_same_logits(
    main: Main, there: dict[str, Ended], folder: Path
) -> None:
    torch = pytest.importorskip("torch", reason=HOW)
    transformers = pytest.importorskip("transformers", reason=HOW)

    run = rx.load(there["gpt2"].folder)
    assert main("export", "gpt2", folder / "model.safetensors")[0] == 0
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 257}
    transformers.GPT2Config(**sizes, bos_token_id=256, eos_token_id=256).save_pretrained(folder)
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.random.default_rng(0).integers(0, 257, (5, 16))
    ours = transformer.logits(run.model, tokens, run.recipe.heads)
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)
