"""GPT-2 on text, from a network that trains on a CPU in minutes to 1.5 billion parameters."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.core.placement.sharding_rules import Rules
from replicax.errors import ConfigError
from replicax.losses import linear_cross_entropy
from replicax.recipes import transformer
from replicax.recipes.corpus import read_corpus
from replicax.recipes.flash3 import check_flash3_shape
from replicax.recipes.recipe import Prediction
from replicax.recipes.text import TextDataset, packed, text_dataset
from replicax.recipes.text_columns import Document
from replicax.text.arguments import Count, Int32Count, Natural, NotNegative, Positive, check_ranges
from replicax.weights.rename_table import Rename

SMALLEST_WINDOW = 32


def _published(layers: int, heads: int, width: int, **fields: Any) -> Mapping[str, Any]:
    """Return a preset of a published size, with GPT-3's training for it (arXiv:2005.14165)."""
    size = {"layers": layers, "heads": heads, "width": width}
    return {**size, "context": 1024, "vocab_size": 50257, **fields}


@dataclasses.dataclass(frozen=True)
class GPT2:
    """GPT-2 on your text, or on the source of Python's modules."""

    batch_size: Int32Count = 32
    """Rows per global batch, each of `context` tokens."""
    epochs: Count = 1
    """Passes over the training text."""
    layers: Count = 4
    """Number of transformer blocks."""
    heads: Count = 4
    """Attention heads per block."""
    width: Count = 128
    """Width of the residual stream."""
    context: Count = 128
    """Context length in tokens."""
    vocab_size: Count | None = None
    """Vocabulary size of the embedding and of a trained BPE; the tokenizer's size by default."""
    data: tuple[Path, ...] | None = None
    """Text, or tables with a column of it: files and folders; by default Python's source code."""
    data_weights: tuple[Positive, ...] | None = None
    """Shares of the training rows that come from each --data; else each row is read once."""
    column: str = "text"
    """Column of a .jsonl or .parquet file, or of a folder that datasets saved."""
    separate_documents: bool = False
    """Attend to the own document only, whose positions count from 0."""
    tokenizer: str = "bytes"
    """bytes; bpe, trained on the text; or the path of a tokenizer.json."""
    learning_rate: float = 2e-3
    """Peak learning rate, reached after 1% of the steps, then cosine decay to a tenth of it."""
    muon_learning_rate: Positive | None = None
    """Peak learning rate of Muon for the matrices of the blocks; by default AdamW trains all."""
    weight_decay: float = 0.1
    """Weight decay, applied to weight matrices only."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient; larger gradients are clipped."""
    remat: transformer.Remat = "selective"
    """Activations to recompute in the backward pass: none, norms and GELU, or whole blocks."""
    attention: transformer.Attention = "cudnn"
    """Attention on NVIDIA GPUs: cuDNN's, or fa3, FlashAttention-3 (H100 and H200, 16 bits)."""
    sample: str | None = None
    """Text to continue after training."""
    sample_tokens: Natural = 200
    """Number of tokens to generate."""
    temperature: NotNegative = 0.8
    """Sampling temperature: below 1 favours likely tokens, 0 always picks the likeliest."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "nano": {},
        # 0.5M tokens per batch; `train` splits batches that do not fit into micro-batches.
        "124m": _published(12, 12, 768, learning_rate=6e-4, remat="none", batch_size=512),
        "350m": _published(24, 16, 1024, learning_rate=3e-4),
        "774m": _published(36, 20, 1280, learning_rate=2.5e-4),
        "1.3b": _published(24, 16, 2048, learning_rate=2e-4),  # heads of 128
        "1.5b": _published(48, 25, 1600, learning_rate=2e-4, remat="full"),
    }

    def __post_init__(self) -> None:
        check_ranges(self, "")
        if self.attention == "fa3":
            check_flash3_shape(self.width // self.heads, self.separate_documents)
        if self.sample is not None:  # before training instead of after it
            check_sampling(self.sample, self.sample_tokens, self.temperature)

    def model(self, key: jax.Array) -> transformer.Params:
        """Return new parameters."""
        return transformer.init(self._shape, key)

    def loss(
        self, model: transformer.Params, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[rx.Weighted, dict[str, rx.Weighted]]:
        """Return cross-entropy `[rows, context]` in nats per token, and bits per byte of text.

        Positions beyond a row's `length` have zero weight. Where documents are separate, one begins
        with the end-of-text token before it, so that no target is lost.
        """
        tokens = batch["tokens"].astype(jnp.int32)
        hidden = transformer.hidden(
            model, tokens[:, :-1], self.heads, self.remat, self._separator, self.attention
        )
        embedding, labels = model["wte"]["weight"], tokens[:, 1:]
        nats = linear_cross_entropy(hidden, embedding, labels.ravel()).reshape(labels.shape)
        real = jnp.arange(self.context) < batch["length"][:, None]
        bits_of_row = jnp.sum(jnp.where(real, nats, 0), axis=1) / math.log(2)
        # A row with only an end-of-text token has no bytes, but its bits count: use a tiny weight.
        bytes_of_row = jnp.maximum(batch["bytes"].astype(jnp.float32), 2**-20)
        bits_per_byte = rx.Weighted(bits_of_row / bytes_of_row, bytes_of_row)
        return rx.Weighted(nats, real), {"bits_per_byte": bits_per_byte}

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW, or Muon and AdamW, with warmup, cosine decay and gradient clipping."""
        decay = self.weight_decay
        descent = optax.adamw(self.schedule(), b2=0.95, weight_decay=decay, mask=_matrices)
        if self.muon_learning_rate is not None:
            rate = self.schedule(self.muon_learning_rate)
            descent = rx.optimizers.muon(
                rate, transformer.MATRICES, rest=descent, weight_decay=decay
            )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), descent)

    def schedule(self, peak: float | None = None) -> optax.Schedule:
        """Return the learning rate as a function of the update count; `peak` instead of AdamW's."""
        peak = self.learning_rate if peak is None else peak
        steps = self.epochs * -(-self._text.train_rows // self.batch_size)
        return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 100, steps, peak / 10)

    def rules(self) -> Rules:
        """Return Megatron-LM's rules (arXiv:1909.08053): heads and the MLP's hidden dims over
        `model`, which sums both outputs; blocks over `stage`; the rest replicated.
        """
        return [
            (r"c_attn'\]\['weight'\]", P("stage", None, None, "model")),
            (r"c_attn'\]\['bias'\]", P("stage", None, "model")),
            (r"c_fc'\]\['weight'\]", P("stage", None, "model")),
            (r"c_fc'\]\['bias'\]", P("stage", "model")),
            (r"c_proj'\]\['weight'\]", P("stage", "model")),
            (r"\['h'\]", P("stage")),
            ("", P()),
        ]

    def train_source(self) -> Any:
        """Return `tokens` `[rows, context + 1]`, `length`, `bytes` `[rows]`; see `TextDataset`."""
        return self._text.train

    def eval_source(self) -> dict[str, np.ndarray]:
        """Return the arrays of `train_source` for the held-out text."""
        return self._text.heldout

    def eval_data(self, path: Path) -> dict[str, np.ndarray]:
        """Return the arrays of `train_source` for all text at `path`."""
        return packed(self._text.tokenizer, read_corpus(path, self.column).documents, self.context)

    def data_description(self) -> str:
        """Describe the text and its tokenization."""
        return self._text.source

    @property
    def tokens_per_row(self) -> int:
        """Number of tokens predicted in a full row."""
        return self.context

    def after_training(self, model: transformer.Params) -> str | None:
        """Return `sample` followed by its continuation."""
        if self.sample is None:
            return None
        return self.continued(
            model, self.sample, tokens=self.sample_tokens, temperature=self.temperature
        )

    def continued(
        self,
        model: transformer.Params,
        text: str,
        *,
        tokens: int,
        temperature: float,
        seed: int = 0,
    ) -> str:
        """Return `text` followed by at most `tokens` generated tokens; see `sample`."""
        tokenizer = self._text.tokenizer
        prompt = tokenizer.encode(Document("the text to continue", text.encode())).tolist()
        if self.separate_documents:  # each begins with it
            prompt = [tokenizer.end_of_text, *prompt]

        drawn = sample(
            self._logits,
            jax.device_put(model, jax.devices()[0]),
            prompt,
            count=tokens,
            context=self.context,
            end=tokenizer.end_of_text,
            temperature=temperature,
            seed=seed,
        )
        return text + tokenizer.decode(drawn)

    def prediction(self) -> Prediction:
        """Return the function of logits `[rows, context, tokens]`, and the shape of a row of text.

        A logit does not depend on later tokens, so a shorter text may end in any.
        """
        return self._logits, jax.ShapeDtypeStruct((self.context,), jnp.int32)

    def weight_names(self) -> Rename:
        """Return GPT-2's published names of the parameters."""
        return transformer.GPT2_NAMES

    @cached_property
    def _text(self) -> TextDataset:
        trained_size = self.vocab_size if self.tokenizer == "bpe" else None
        paths: Any = self.data or ()  # one path will do in a program, and is what older runs saved
        return text_dataset(
            [paths] if isinstance(paths, Path) else paths,
            self.tokenizer,
            trained_size,
            self.context,
            self.column,
            self.data_weights or (),
        )

    def _logits(self, params: transformer.Params, tokens: jax.Array) -> jax.Array:
        scores = transformer.logits(params, tokens, self.heads, separator=self._separator)
        return scores[..., : self._text.tokenizer.vocab_size]  # rows beyond are untrained

    @property
    def _separator(self) -> int | None:
        return self._text.tokenizer.end_of_text if self.separate_documents else None

    @cached_property
    def _shape(self) -> transformer.Shape:
        tokens = self._text.tokenizer.vocab_size
        vocab_size = tokens if self.vocab_size is None else self.vocab_size
        if vocab_size < tokens:
            raise ConfigError(
                f"vocab_size={vocab_size} but the tokenizer has {tokens} tokens; each needs an "
                f"embedding row: raise it to {tokens}, or leave it out"
            )
        return transformer.Shape(self.layers, self.heads, self.width, self.context, vocab_size)


def _matrices(params: transformer.Params) -> Any:
    """Mask the parameters with weight decay: all except biases and norms."""

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        *_, parent, name = (entry.key for entry in path)
        return name == "weight" and not parent.startswith("ln_")

    return jax.tree.map_with_path(decays, params)


def sample(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: Sequence[int],
    *,
    count: int,
    context: int,
    end: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Sample tokens one at a time, each from the network's prediction after the previous ones.

    `logits` maps `params` and ints `[1, tokens]`, the last `context` tokens, to
    `[1, tokens, vocab_size]`. At most `count` tokens are drawn, up to the token `end`, which is
    excluded; a `temperature` below 1 favours likely tokens, and 0 always picks the likeliest.
    """
    check_sampling(prompt, count, temperature)

    @jax.jit  # `params` is an argument: captured arrays become constants
    def draw(params: Any, window: jax.Array, filled: jax.Array, key: jax.Array) -> jax.Array:
        last = logits(params, window[None])[0, filled - 1].astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(last)
        return jax.random.categorical(key, last / temperature)

    tokens = [int(token) for token in prompt]
    for key in jax.random.split(jax.random.key(seed), count):
        recent = tokens[-context:]
        # A few window sizes, with one program each, so that short texts stay cheap.
        size = min(max(SMALLEST_WINDOW, 1 << (len(recent) - 1).bit_length()), context)
        window = np.zeros(size, np.int32)
        window[: len(recent)] = recent
        drawn = int(draw(params, window, np.int32(len(recent)), key))
        if drawn == end:
            break
        tokens.append(drawn)
    return tokens[len(prompt) :]


def check_sampling(prompt: Sized, count: int, temperature: float) -> None:
    """Raise `ConfigError` for invalid arguments of `sample`."""
    if not len(prompt):
        raise ConfigError("the text to continue is empty; provide at least one character")
    for name, value in (("count", count), ("temperature", temperature)):
        if not value >= 0:
            raise ConfigError(f"{name}={value}; it must be at least 0: raise it")
