"""Training steps of PyTorch in one of several processes, for processes.py; DDP over Gloo.

Answers a number of steps with the seconds per step and their losses.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt_torch import GPT, published
from lenet_torch import lenet
from process_group import serve
from torch import nn


class LeNetLoss(nn.Module):
    """A LeNet that returns the mean cross-entropy for uint8 images `[rows, 28, 28, 1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = lenet()

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        images = image.reshape(-1, 1, 28, 28).float() / 255
        return nn.functional.cross_entropy(self.layers(images), label)


def make(name: str, arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> Any:
    """Return the model and its optimizer."""
    if name == "gpt":
        model: nn.Module = GPT(**settings["shape"])
        model.load_state_dict(published(arrays))
        return model, torch.optim.AdamW(model.parameters(), **settings["adamw"], fused=True)
    model = LeNetLoss()
    model.layers.load_state_dict({name: torch.from_numpy(each) for name, each in arrays.items()})
    return model, torch.optim.SGD(model.parameters(), **settings["sgd"], fused=True)


def inputs(name: str, batch: dict[str, np.ndarray], own: slice) -> list[torch.Tensor]:
    """Return the model's inputs."""
    if name == "gpt":
        tokens = torch.from_numpy(batch["tokens"][own].astype(np.int64))
        return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
    return [
        torch.from_numpy(batch["image"][own]),
        torch.from_numpy(batch["label"][own].astype(np.int64)),
    ]


def prepare(
    folder: Path, name: str, how: str, rows: int, process: int, processes: int, port: int
) -> Any:
    """Prepare a process, which uses its own rows of the batch."""
    torch.set_num_threads(1)
    if processes > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=process, world_size=processes
        )
    settings = json.loads((folder / "settings.json").read_text())
    model, optimizer = make(name, dict(np.load(folder / f"{name}-start.npz")), settings)
    batch = inputs(
        name,
        dict(np.load(folder / f"{name}-batch.npz")),
        slice(process * rows, (process + 1) * rows),
    )
    parallel = model
    if processes > 1:
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    run = torch.compile(parallel) if how == "compile" else parallel

    def step() -> torch.Tensor:
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def steps(count: int) -> dict[str, Any]:
        step()  # synchronizes the processes
        started = time.perf_counter()
        losses = torch.stack([step() for _ in range(count)])
        seconds = (time.perf_counter() - started) / count
        if processes > 1:
            torch.distributed.all_reduce(losses)
        return {"seconds": seconds, "losses": (losses / processes).tolist()}

    return {"bytes": _reduced(parallel) if processes > 1 else 0}, steps


def _reduced(model: nn.parallel.DistributedDataParallel) -> int:
    """Return the bytes of all gradient buckets, before the first step rebuilds them."""
    sizes = model._get_ddp_logging_data().get("bucket_sizes", "")
    return sum(int(size) for size in str(sizes).split(",") if size.strip())


def main() -> None:
    folder, name, how, *numbers = sys.argv[1:]
    serve(partial(prepare, Path(folder), name, how, *map(int, numbers)))


if __name__ == "__main__":
    main()
