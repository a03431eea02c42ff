"""GPT training steps in PyTorch, for gpt.py: answers a number of steps with their losses.

FOLDER contains settings.json, and start.npz with the tokens and the parameters under their
published names.
"""

import argparse
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch_peer import Run, serve


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = (
            each.view(rows, tokens, self.heads, -1).transpose(1, 2)
            for each in self.c_attn(x).split(width, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).reshape(rows, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(nn.functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT that returns the mean cross-entropy of `targets` given `tokens`, `[rows, tokens]`."""

    def __init__(self, layers: int, heads: int, width: int, context: int, vocab_size: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = nn.functional.linear(self.ln_f(x), self.wte.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def published(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the parameters of `GPT`: published blocks are [in, out], Linear's [out, in]."""
    return {
        name: torch.from_numpy(array.T if name.startswith("h.") and array.ndim == 2 else array)
        for name, array in arrays.items()
    }


def prepare(folder: Path, how: str, settings: SimpleNamespace, processes: int, rank: int) -> Run:
    """Prepare a process, which uses its own rows of the batch."""
    device = torch.device(settings.platform, *([rank] if settings.platform == "cuda" else []))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, as JAX does by default
    arrays = dict(np.load(folder / "start.npz"))
    batch = torch.from_numpy(arrays.pop("tokens")).chunk(processes)[rank].to(device)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    model = GPT(**settings.shape)
    model.load_state_dict(published(arrays))
    model.to(device)
    # On two cores, fused takes 11 ms for 10 million parameters, foreach 74 and neither 100.
    optimizer = torch.optim.AdamW(model.parameters(), **settings.adamw, fused=True)
    if processes > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if how.endswith("compile"):
        model = torch.compile(model)
    bfloat16 = settings.precision == "bfloat16"

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(count: int) -> list[float]:
        losses = torch.stack([step() for _ in range(count)])
        if processes > 1:
            torch.distributed.all_reduce(losses)
        return (losses / processes).tolist()

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("how", choices=["eager", "compile", "ddp", "ddp-compile"])
    args = parser.parse_args()
    settings = SimpleNamespace(**json.loads((args.folder / "settings.json").read_text()))
    processes = settings.devices if args.how.startswith("ddp") else 1
    serve(
        functools.partial(prepare, args.folder, args.how, settings, processes),
        processes,
        threads=max(settings.cores // processes, 1),
        backend="nccl" if settings.platform == "cuda" else "gloo",
    )


if __name__ == "__main__":
    main()
