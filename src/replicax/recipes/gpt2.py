"""GPT-2 on text, from a network a CPU trains in minutes to the published 1.5 billion parameters."""

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
from replicax.core.partition import Rules
from replicax.errors import ConfigError
from replicax.losses import linear_cross_entropy
from replicax.recipes import transformer
from replicax.recipes.corpus import Document, read_corpus
from replicax.recipes.gpt2_weights import load_weights, published
from replicax.recipes.text import TextDataset, packed, text_dataset

SMALLEST_WINDOW = 32


def _published(layers: int, heads: int, width: int, **fields: Any) -> Mapping[str, Any]:
    """A preset of a published size, trained as GPT-3's of that size (arXiv:2005.14165)."""
    size = {"layers": layers, "heads": heads, "width": width}
    return {**size, "context": 1024, "vocab_size": 50257, **fields}


@dataclasses.dataclass(frozen=True)
class GPT2:
    """GPT-2 on text: your own, or the source of Python's standard library."""

    batch_size: int = 32
    """Rows of a global batch, each of `context` tokens."""
    epochs: int = 1
    """Passes over the training text."""
    layers: int = 4
    """Blocks of attention and MLP."""
    heads: int = 4
    """Heads of each attention."""
    width: int = 128
    """Dims of the residual stream."""
    context: int = 128
    """Tokens a prediction may look back on."""
    vocab_size: int | None = None
    """Rows of the embedding, and tokens of a BPE that is trained; the tokenizer's by default."""
    data: Path | None = None
    """File or folder of text; by default the source of Python's standard library."""
    tokenizer: str = "bytes"
    """bytes; bpe, which is trained on the text; or the path of a tokenizer.json."""
    learning_rate: float = 2e-3
    """Peak learning rate, reached after 1% of the steps, then cosine decay to a tenth of it."""
    weight_decay: float = 0.1
    """AdamW weight decay, applied to weight matrices only."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; longer ones are shortened to it."""
    remat: transformer.Remat = "selective"
    """Activations that the backward pass recomputes to save memory: none, norms and GELU (which is
    also the fastest on a CPU), or whole blocks."""
    init_from: Path | None = None
    """Weights to start from: a .safetensors file with the published names."""
    sample: str | None = None
    """Text to continue after training."""
    sample_tokens: int = 200
    """Tokens to continue it by."""
    temperature: float = 0.8
    """Temperature of the continuation: below 1 for likelier tokens, 0 for the likeliest."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "nano": {},
        # 0.5M tokens a batch; what does not fit at once, `train` computes in micro-batches.
        "124m": _published(12, 12, 768, learning_rate=6e-4, remat="none", batch_size=512),
        "350m": _published(24, 16, 1024, learning_rate=3e-4),
        "774m": _published(36, 20, 1280, learning_rate=2.5e-4),
        "1.5b": _published(48, 25, 1600, learning_rate=2e-4, remat="full"),
    }

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it is at least 1: raise it")
        if self.sample is not None:  # now, and not when the training is over
            check_sampling(self.sample, self.sample_tokens, self.temperature)

    def model(self, key: jax.Array) -> transformer.Params:
        """New parameters, or those of `init_from`."""
        if self.init_from is not None:
            return load_weights(self.init_from, self._shape)
        return transformer.init(self._shape, key)

    def loss(
        self, model: transformer.Params, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[rx.Weighted, dict[str, rx.Weighted]]:
        """Cross-entropy `[rows, context]` in nats a token, and bits a byte of text.

        Positions beyond a row's `length` have no weight.
        """
        tokens = batch["tokens"].astype(jnp.int32)
        hidden = transformer.hidden(model, tokens[:, :-1], self.heads, self.remat)
        embedding, labels = model["wte"]["weight"], tokens[:, 1:]
        nats = linear_cross_entropy(hidden, embedding, labels.ravel()).reshape(labels.shape)
        real = jnp.arange(self.context) < batch["length"][:, None]
        bits_of_row = jnp.sum(jnp.where(real, nats, 0), axis=1) / math.log(2)
        # A row that only ends a text has no bytes, but its bits count: hardly a byte, not none.
        bytes_of_row = jnp.maximum(batch["bytes"].astype(jnp.float32), 2**-20)
        bits_per_byte = rx.Weighted(bits_of_row / bytes_of_row, bytes_of_row)
        return rx.Weighted(nats, real), {"bits_per_byte": bits_per_byte}

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW, warmed up and cooled down, its gradient clipped."""
        decay = self.weight_decay
        descent = optax.adamw(self.schedule(), b2=0.95, weight_decay=decay, mask=_matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), descent)

    def schedule(self) -> optax.Schedule:
        """The learning rate, by updates before."""
        steps = self.epochs * -(-len(self._text.train["length"]) // self.batch_size)
        return optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, steps // 100, steps, self.learning_rate / 10
        )

    def rules(self) -> Rules:
        """Megatron-LM's (arXiv:1909.08053): of the blocks, heads and the MLP's hidden dims over
        `model`, which adds up what both give back; blocks over `stage`; the rest whole.
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

    def train_source(self) -> dict[str, np.ndarray]:
        """`tokens` `[rows, context + 1]`, `length` and `bytes` `[rows]`; see `TextDataset`."""
        return self._text.train

    def eval_source(self) -> dict[str, np.ndarray]:
        """The same of the held-out text."""
        return self._text.heldout

    def eval_data(self, path: Path) -> dict[str, np.ndarray]:
        """The same of all text at `path`."""
        return packed(self._text.tokenizer, read_corpus(path).documents, self.context)

    def data_description(self) -> str:
        """Which text was found, and how it became tokens."""
        return self._text.source

    @property
    def tokens_per_row(self) -> int:
        """Tokens predicted in a full row."""
        return self.context

    def after_training(self, model: transformer.Params) -> str | None:
        """The continuation of `sample`, with it."""
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
        """`text`, and at most so many tokens after it; see `sample`."""
        tokenizer = self._text.tokenizer
        known = tokenizer.vocab_size  # of the rows beyond, no text has trained any

        def logits(params: transformer.Params, tokens: jax.Array) -> jax.Array:
            return transformer.logits(params, tokens, self.heads)[..., :known]

        drawn = sample(
            logits,
            jax.device_put(model, jax.devices()[0]),
            tokenizer.encode(Document("the text to continue", text.encode())).tolist(),
            count=tokens,
            context=self.context,
            end=tokenizer.end_of_text,
            temperature=temperature,
            seed=seed,
        )
        return text + tokenizer.decode(drawn)

    def published_weights(self, model: transformer.Params) -> dict[str, np.ndarray]:
        """The parameters under GPT-2's published names, in float32."""
        return published(model)

    @cached_property
    def _text(self) -> TextDataset:
        trained_size = self.vocab_size if self.tokenizer == "bpe" else None
        return text_dataset(self.data, self.tokenizer, trained_size, self.context)

    @cached_property
    def _shape(self) -> transformer.Shape:
        tokens = self._text.tokenizer.vocab_size
        vocab_size = tokens if self.vocab_size is None else self.vocab_size
        if vocab_size < tokens:
            raise ConfigError(
                f"vocab_size={vocab_size} and the tokenizer has {tokens} tokens; each needs a row "
                f"of the embedding: raise it to {tokens}, or leave it out"
            )
        return transformer.Shape(self.layers, self.heads, self.width, self.context, vocab_size)


def _matrices(params: transformer.Params) -> Any:
    """Which parameters decay: all but biases and norms."""

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
    """Tokens drawn one after the other, each from what the network expects after those before it.

    `logits` of `params` and ints `[1, tokens]` are `[1, tokens, vocab_size]`. It is given the last
    `context` tokens. At most `count` are drawn, up to the token `end`, which is left out; at a
    `temperature` below 1 the likelier ones, at 0 the likeliest.
    """
    check_sampling(prompt, count, temperature)

    @jax.jit  # `params` as an argument: what is closed over becomes part of the program
    def draw(params: Any, window: jax.Array, filled: jax.Array, key: jax.Array) -> jax.Array:
        last = logits(params, window[None])[0, filled - 1].astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(last)
        return jax.random.categorical(key, last / temperature)

    tokens = [int(token) for token in prompt]
    for key in jax.random.split(jax.random.key(seed), count):
        seen = tokens[-context:]
        # Windows of a few sizes: a program for each, and short texts cost little.
        size = min(max(SMALLEST_WINDOW, 1 << (len(seen) - 1).bit_length()), context)
        window = np.zeros(size, np.int32)
        window[: len(seen)] = seen
        drawn = int(draw(params, window, np.int32(len(seen)), key))
        if drawn == end:
            break
        tokens.append(drawn)
    return tokens[len(prompt) :]


def check_sampling(prompt: Sized, count: int, temperature: float) -> None:
    """Raise `ConfigError` for what `sample` cannot do."""
    if not len(prompt):
        raise ConfigError("the text to continue is empty; give at least one character")
    for name, value in (("count", count), ("temperature", temperature)):
        if not value >= 0:
            raise ConfigError(f"{name}={value}; it is at least 0: raise it")
