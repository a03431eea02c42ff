"""GPT-2 on a small text: it learns, counts only text, and reduces once."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file
from support.command_line import Main, one_line
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.analysis.compiled import Collectives, inspect
from replicax.cli.flags import parse_with_recipe
from replicax.cli.train import TrainOptions
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.transformer import Params, Shape, published

LINE = b"one two three four five six seven eight nine ten\n"
HELD_OUT = LINE * 3 + b"one two three"  # 160 bytes, and an end of text that is no byte
CONTEXT = 16
TINY = {"layers": 1, "width": 16, "heads": 2, "context": CONTEXT}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 documents; the last is held out."""
    path = tmp_path_factory.mktemp("text")
    for i in range(19):
        (path / f"{i:02}.txt").write_bytes(LINE * 20)
    (path / "19.txt").write_bytes(HELD_OUT + b"!")
    return path


@EXHAUSTIVE
def test_it_learns(texts: Path) -> None:
    recipe = GPT2(
        data=(texts,),
        **TINY,
        epochs=8,
        learning_rate=1e-2,
        sample=LINE[:20].decode(),
        temperature=0,
    )
    dp = rx.DataParallel(recipe.loss, recipe.optimizer(), mode="single")
    result = rx.fit(
        dp,
        dp.init(recipe.model(jax.random.key(0))),
        recipe.train_source(),
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        eval_source=recipe.eval_source(),
        progress=False,
    )
    model, metrics = dp.model(result.state), result.metrics
    untrained = math.log2(257)
    assert metrics["bits_per_byte"] < untrained / 4
    continued = recipe.after_training(model)
    assert continued.startswith((LINE * 2).decode()[:60])


def test_bits_per_byte_are_those_of_a_hand_count(texts: Path) -> None:
    recipe = GPT2(data=(texts,), **TINY)
    source = recipe.eval_source()
    # As far from equal probabilities as a trained one.
    model = jax.tree.map(lambda leaf: 5 * leaf, recipe.model(jax.random.key(0)))
    dp = rx.DataParallel(recipe.loss, optax.sgd(0.1), mode="single")
    found = dp.evaluate(dp.init(model), dp.feed(source, 9))
    assert source["length"].tolist() == [16] * 10 + [1]
    # The last row's one target ends the text: no byte, and yet it takes bits to say.
    assert source["bytes"].tolist() == [16] * 10 + [0]
    tokens = source["tokens"].astype(np.int32)
    logits = np.asarray(transformer.logits(model, tokens[:, :-1], recipe.heads, "none"), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -sum(
        log_p[row, at, tokens[row, at + 1]]
        for row, length in enumerate(source["length"])
        for at in range(length)
    )
    targets = len(HELD_OUT) + 1  # all but the first byte, which nothing predicts
    assert found["loss"] == pytest.approx(nats / targets, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(HELD_OUT), rel=1e-6)
    dp = rx.DataParallel(recipe.loss, optax.sgd(0.1))  # on eight devices, and padded
    padded = dp.evaluate(dp.init(model), dp.feed(source, 9))
    assert {name: padded[name] for name in found} == pytest.approx(found, rel=1e-6)


def weighted_mean(recipe: GPT2, batch: dict[str, np.ndarray]) -> Callable[[Params], Any]:
    def mean(params: Params) -> Any:
        loss, metrics = recipe.loss(params, batch, None)
        bits = metrics["bits_per_byte"]
        means = [(x.values * x.weights).sum() / x.weights.sum() for x in (loss, bits)]
        return means[0], means[1]

    return mean


def test_the_embedding_has_a_row_for_every_token(texts: Path) -> None:
    recipe = GPT2(data=(texts,), vocab_size=400, **TINY, sample="one", temperature=1e6)
    model = recipe.model(jax.random.key(0))
    assert model["wte"]["weight"].shape == (400, 16)
    # Ids without a token are never drawn, however untrained the network is.
    assert (recipe.after_training(model) or "").startswith("one")


def test_what_decays_are_the_matrices(texts: Path) -> None:
    recipe = GPT2(data=(texts,), **TINY, weight_decay=0.5, learning_rate=0.1)
    optimizer = recipe.optimizer()
    shapes = jax.eval_shape(recipe.model, jax.random.key(0))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)

    @jax.jit
    def update(params: Params) -> Params:
        no_gradient = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(no_gradient, optimizer.init(params), params)
        return updates

    decayed = {
        ".".join(entry.key for entry in path)
        for path, leaf in jax.tree.leaves_with_path(update(ones))
        if leaf.any()
    }
    assert decayed == {
        "wte.weight",
        "wpe.weight",
        *(f"h.{name}.weight" for name in ("attn.c_attn", "attn.c_proj")),
        *(f"h.{name}.weight" for name in ("mlp.c_fc", "mlp.c_proj")),
    }


def test_the_rate_rises_and_falls_over_the_run(texts: Path) -> None:
    recipe = GPT2(data=(texts,), **TINY, epochs=7, batch_size=23, weight_decay=1.0)
    rows = len(recipe.train_source()["length"])
    steps = 7 * math.ceil(rows / 23)
    assert 300 < steps < 400
    optimizer = recipe.optimizer()
    params = {"wte": {"weight": jnp.ones(1)}}
    gradient = {"wte": {"weight": jnp.zeros(1)}}  # so that an update is the decay: rate x 1

    def step(state: Any, _: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return state, -updates["wte"]["weight"][0]

    _, rates = jax.lax.scan(step, optimizer.init(params), length=steps + 1)
    assert np.argmax(rates) == 3
    assert rates[0] == 0
    assert rates[3] == pytest.approx(recipe.learning_rate, rel=1e-5)
    assert (np.diff(rates[3:]) < 0).all()
    assert rates[steps] == pytest.approx(recipe.learning_rate / 10, rel=1e-4)


def test_a_long_gradient_is_shortened(texts: Path) -> None:
    optimizer = GPT2(data=(texts,), **TINY, clip_norm=0.5).optimizer()
    params = {"wte": {"weight": jnp.ones(4)}}
    for norm, expected in ((30.0, 0.5), (0.3, 0.3)):
        gradient = {"wte": {"weight": jnp.full(4, norm / 2)}}
        _, state = optimizer.update(gradient, optimizer.init(params), params)
        (mean,) = jax.tree.leaves(optax.tree.get(state, "mu"))
        assert float(jnp.linalg.norm(mean)) == pytest.approx(expected / 10, rel=1e-5)


def test_without_a_sample_nothing_is_said() -> None:
    assert GPT2(**TINY).after_training({}) is None


@pytest.mark.parametrize("name", GPT2.presets)
def test_the_presets_parse(name: str) -> None:
    flags = ["--preset", name, "--epochs", "3"]
    arguments = parse_with_recipe("train", TrainOptions, ["gpt2", *flags])
    recipe = arguments.recipe
    assert arguments.preset == name
    assert recipe == GPT2(**{**GPT2.presets[name], "epochs": 3})
    assert recipe.tokens_per_row == (1024 if name != "nano" else 128)


@pytest.mark.parametrize("mode", only(["shard_map"], ["shard_map", "jit"]))
@pytest.mark.parametrize("devices", only([2], [2, 8]))
@pytest.mark.parametrize("accumulate", only([1], [1, 4]))
def test_the_tied_embedding_is_reduced_once(accumulate: int, devices: int, mode: str) -> None:
    """Its two gradients, of the input and of the output, are one before they travel."""
    shapes = jax.eval_shape(lambda: transformer.init(Shape(1, 2, 16, 8, 257), jax.random.key(0)))
    parameters = 257 * 16 + 8 * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16
    assert parameters == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    rows = {"tokens": np.zeros((32, 9), np.uint16), "length": np.full(32, 8, np.int32)}
    batch = {**rows, "bytes": np.full(32, 8, np.int32)}
    mesh = rx.make_mesh(devices=jax.devices()[:devices])
    loss = GPT2(heads=2, context=8).loss
    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh, mode=mode, accumulate=accumulate)
    (found,) = inspect(dp.lower(shapes, batch).compile()).collectives
    # A total and a weight of the loss, and of bits_per_byte; the divisor of the gradient.
    least = 4 * (parameters + 5)
    assert found.kind == "all-reduce"
    assert found.bytes >= least
    assert mode == "jit" or found == Collectives("all-reduce", 1, least)


TRAIN = ["train", "gpt2", *(f"--{name}={size}" for name, size in TINY.items())]


def empty(folder: Path) -> list[object]:
    (folder / "empty.txt").touch()
    return ["--data", folder / "empty.txt"]


def latin(folder: Path) -> list[object]:
    (folder / "latin.txt").write_bytes("naïve, ".encode("latin-1") * 200)
    return ["--data", folder / "latin.txt"]


def text(folder: Path) -> list[object]:
    (folder / "text.txt").write_bytes(LINE * 20)
    return ["--data", folder / "text.txt"]


def weights(folder: Path) -> list[object]:
    params = transformer.init(Shape(1, 2, 16, CONTEXT, 300), jax.random.key(0))
    save_file(published(params), folder / "model.safetensors")
    return [*text(folder), "--init-from", folder / "model.safetensors"]


@pytest.mark.parametrize(
    ("files", "flags", "words"),
    [
        (empty, [], ["no text in", "empty.txt", "a file"]),
        (latin, ["--tokenizer", "bpe"], ["latin.txt is not UTF-8", "0xef at offset 2"]),
        (text, ["--context", "1024"], ["context 1,024", "1,025 tokens", "has 932", "--context"]),
        (text, ["--tokenizer", "bites"], ["'bites'", "mean 'bytes'"]),
        (text, ["--vocab-size", "10"], ["vocab_size=10", "257 tokens", "raise it to 257"]),
        (text, ["--heads", "3"], ["width=16 and heads=3", "multiple"]),
        (text, ["--layers", "0"], ["layers=0", "at least 1"]),
        (text, ["--sample", ""], ["text to continue is empty"]),
        (text, ["--sample", "a", "--sample-tokens", "-1"], ["sample_tokens=-1", "at least 0"]),
        (text, ["--remat", "some"], ["'some'", "--remat", "selective"]),
        (text, ["--preset", "125m"], ["'125m'", "nano, 124m", "mean '124m'"]),
        (text, ["--init-from", "nowhere"], ["nowhere is not", ".safetensors"]),
        (weights, [], ["1 tensor", "wte.weight [300, 16]", "takes [257, 16]"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__,
)
def test_a_user_error_is_one_line_and_exit_code_2(
    files: Callable[[Path], list[object]],
    flags: list[object],
    words: list[str],
    main: Main,
    folder: Path,
) -> None:
    code, _, err = main(*TRAIN, *files(folder), *flags)
    line = one_line(err)
    assert code == 2
    for word in words:
        assert word in line
    assert not (folder / "runs").exists()


@EXHAUSTIVE
def test_bytes_of_any_kind_can_be_trained_on(main: Main, folder: Path) -> None:
    flags = ["--mode", "single", "--steps", "2", "--sample", "na", "--sample-tokens", "3"]
    code, out, err = main(*TRAIN, *latin(folder), *flags)
    assert (code, err) == (0, "")
    unwrapped = " ".join(out.split())
    assert "latin.txt: 1 file, 1,400 bytes; bytes (vocabulary 257)" in unwrapped
    assert "bits_per_byte" in out
    assert "\nsee    runs/gpt2-" in out
    *_, blank, continued = out.splitlines()
    assert blank == ""
    assert continued.startswith("na")
