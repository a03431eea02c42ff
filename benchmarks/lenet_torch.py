"""One epoch of LeNet in PyTorch, for lenet_peers.py: prints its seconds and mean loss as JSON.

FOLDER holds images.npy and labels.npy, of uint8 and integers. Rows are shuffled on the host, and
become floats in the step.
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORKERS = 2
WARM_UP_BATCHES = 5


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def train(model: nn.Module, args: argparse.Namespace, rank: int = 0, workers: int = 1) -> dict:
    """Every process draws the same order and takes its own rows."""
    images = np.load(args.folder / "images.npy")
    labels = np.load(args.folder / "labels.npy").astype(np.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=args.momentum)
    rows = args.batch_size // workers

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.reshape(-1, 1, 28, 28).float() / 255
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def epoch(seed: int, batches: int) -> float:
        order = np.random.default_rng(seed).permutation(len(images))
        losses = []
        for first in range(0, batches * args.batch_size, args.batch_size):
            own = order[first : first + args.batch_size][rank * rows : (rank + 1) * rows]
            losses.append(step(torch.from_numpy(images[own]), torch.from_numpy(labels[own])))
        return torch.stack(losses).mean().item()

    epoch(0, WARM_UP_BATCHES)
    started = time.perf_counter()
    loss = epoch(args.seed, len(images) // args.batch_size)
    return {"seconds": time.perf_counter() - started, "loss": loss}


def train_worker(rank: int, args: argparse.Namespace, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    dist.init_process_group("gloo", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    result = train(nn.parallel.DistributedDataParallel(lenet()), args, rank, WORKERS)
    if rank == 0:
        results.put(result)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("how", choices=["eager", "compile", "ddp"])
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--momentum", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    if args.how == "ddp":
        args.port = free_port()
        results = mp.get_context("spawn").SimpleQueue()
        workers = mp.spawn(train_worker, (args, results), WORKERS, join=False)
        result = results.get()
        while not workers.join():
            pass
    else:
        torch.set_num_threads(WORKERS)
        torch.manual_seed(0)
        model = lenet()
        result = train(torch.compile(model) if args.how == "compile" else model, args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
