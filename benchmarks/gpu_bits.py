"""Mode `exact`: two processes and two numbers of micro-batches must produce the same bits.

GPT-2 `nano` in bfloat16, ten steps, without autotuning (see docs/exact.md); each process compiles
separately.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from gpt import OPTIMIZER
from gpu_gpt import TINY
from gpu_part import answer, options
from gpu_plans import gpt2, made_up_batch

import replicax as rx

ROWS, STEPS = 32, 10


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the digests of two processes."""
    if args.digests:
        return digests(args.tiny)
    found = [in_a_process(args.tiny) for _ in range(2)]
    different = {digest for each in found for digest in each.values()}
    summary = {
        f"process {number}, {name}": digest
        for number, each in enumerate(found, 1)
        for name, digest in each.items()
    }
    summary["different digests"] = len(different)
    if len(different) > 1:
        summary["error"] = f"{len(different)} digests, but mode exact guarantees one"
    return summary


def in_a_process(tiny: bool) -> dict[str, str]:
    """Return the digests of a separate process, without a shared compilation cache."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags.strip()}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, __file__, "--digests", *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if done.returncode or not found:
        raise RuntimeError(found.get("error", f"a process exited with {done.returncode}"))
    return found


def digests(tiny: bool) -> dict[str, str]:
    """Return the start of the SHA-256 of the trained parameters, per number of micro-batches."""
    recipe = gpt2(**({**TINY, "layers": 1} if tiny else {}))
    found = {}
    for accumulate in (1, 4):
        dp = rx.DataParallel(
            recipe.loss,
            OPTIMIZER,
            mesh=rx.make_mesh(devices=jax.devices()[:1]),
            mode="exact",
            precision="bfloat16",
            accumulate=accumulate,
        )
        state = dp.init(recipe.model(jax.random.key(0)))
        (batch,) = dp.feed(made_up_batch(recipe, ROWS), ROWS)
        for _ in range(2 if tiny else STEPS):
            state, _ = dp.step(state, batch)
        arrays = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)]
        found[f"accumulate={accumulate}"] = hashlib.sha256(b"".join(arrays)).hexdigest()[:12]
    return found


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--digests", action="store_true", help="of this process only")
    answer(measure, parser)
