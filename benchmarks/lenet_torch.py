"""Epochs of LeNet in PyTorch, for lenet_peers.py: answers a seed with the epoch's mean loss.

FOLDER contains images.npy (uint8) and labels.npy (integers). Rows are shuffled on the host, and
converted to floats in the step.
"""

import argparse
import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch_peer import Run, serve

WORKERS = 2
WARM_UP_BATCHES = 5


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def prepare(args: argparse.Namespace, processes: int, rank: int) -> Run:
    """Prepare a process; all draw the same order, and each uses its own rows."""
    images = np.load(args.folder / "images.npy")
    labels = np.load(args.folder / "labels.npy").astype(np.int64)
    torch.manual_seed(0)
    model = lenet()
    if processes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    if args.how == "compile":
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=args.momentum)
    rows = args.batch_size // processes

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.reshape(-1, 1, 28, 28).float() / 255
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def epoch(seed: int, batches: int = len(images) // args.batch_size) -> float:
        order = np.random.default_rng(seed).permutation(len(images))
        losses = []
        for first in range(0, batches * args.batch_size, args.batch_size):
            own = order[first : first + args.batch_size][rank * rows : (rank + 1) * rows]
            losses.append(step(torch.from_numpy(images[own]), torch.from_numpy(labels[own])))
        return torch.stack(losses).mean().item()

    epoch(0, WARM_UP_BATCHES)
    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--momentum", type=float, required=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("how", choices=["eager", "compile", "ddp"])
    args = parser.parse_args()
    processes = WORKERS if args.how == "ddp" else 1
    serve(functools.partial(prepare, args, processes), processes, threads=WORKERS // processes)


if __name__ == "__main__":
    main()
