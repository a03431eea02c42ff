"""GPT-2's step in PyTorch, with the same parameters, tokens and AdamW as `gpu_gpt.py`."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gpt import BETAS, LEARNING_RATE, STEPS_COMPARED, WEIGHT_DECAY
from gpu_gpt import PRECISION, Subject, compared, figures, subject
from gpu_part import LeftOutError, answer, options, seconds_a_step
from torch_peer import Peer, torch_version

from replicax.analysis.hardware import CHIPS, chip_of_kind
from replicax.bench.machine import core_count
from replicax.recipes import transformer
from replicax.recipes.transformer import published


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure PyTorch; JAX creates the parameters on the CPU."""
    jax.config.update("jax_platforms", "cpu")
    if torch_version(args.torch_python) is None:
        raise LeftOutError(f"{args.torch_python} has no torch: see --torch-python")
    given = subject(args)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given, "cpu" if args.tiny else "cuda")
        steps = Peer(args.torch_python, "gpt_torch.py", [folder, args.how])
        losses = steps(STEPS_COMPARED)
        seconds = seconds_a_step(steps, 3 if args.tiny else 10)
    chip = CHIPS["h200"] if args.tiny else chip_of_kind(args.device)
    return {**figures(given, seconds, chip), **compared(given, losses)}


def write(folder: Path, given: Subject, platform: str) -> None:
    """Write the settings and arrays that gpt_torch.py reads."""
    settings = {
        "shape": dataclasses.asdict(given.shape),
        "adamw": {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
        "precision": PRECISION,
        "platform": platform,
        "devices": 1,
        "cores": core_count(),
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    params = transformer.init(given.shape, jax.random.key(0))
    tokens = given.batch["tokens"].astype(np.int64)
    np.savez(folder / "start.npz", tokens=tokens, **published(params))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--how", choices=["eager", "compile"], default="compile")
    parser.add_argument("--padded", action="store_true", help="pad the vocabulary")
    parser.add_argument("--device", default="", help="the GPU's device_kind, for the MFU")
    parser.add_argument("--torch-python", required=True, help="an interpreter, possibly with torch")
    answer(measure, parser)
