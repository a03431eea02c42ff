"""Mode `exact`: two processes and two numbers of micro-batches must produce the same bits.

GPT-2 `nano` in bfloat16, ten steps, without autotuning and with recorded kernels (docs/exact.md);
each process compiles separately.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from gpt import OPTIMIZER
from gpu_gpt import TINY
from gpu_part import answer, last_answer, options
from gpu_plans import gpt2, made_up_batch

import replicax as rx

ROWS, STEPS = 32, 10


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the digests of two processes."""
    if args.digests:
        return digests(args.tiny, args.tuning, args.record)
    kinds: dict[str, list[str]] = {"": ["--xla_gpu_autotune_level=0"]}
    if not args.tiny:
        path = in_a_process(args.tiny, "--record", tempfile.mkdtemp())["tuning"]
        kinds["recorded kernels, "] = ["", "--tuning", path]
    summary: dict[str, Any] = {}
    for kind, (flags, *more) in kinds.items():
        found = [in_a_process(args.tiny, *more, flags=flags) for _ in range(2)]
        for number, each in enumerate(found, 1):
            summary |= {f"{kind}process {number}, {name}": bits for name, bits in each.items()}
        different = len({bits for each in found for bits in each.values()})
        summary[f"{kind}different digests"] = different
        if different > 1:
            summary["error"] = f"{kind}{different} digests, but mode exact guarantees one"
    return summary


def in_a_process(tiny: bool, *more: str, flags: str = "") -> dict[str, str]:
    """Return the digests of a separate process, without a shared compilation cache."""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, __file__, "--digests", *(["--tiny"] if tiny else []), *more]
    return last_answer(command, environment)


def digests(tiny: bool, tuning: str | None, record: str | None) -> dict[str, str]:
    """Return the start of the SHA-256 of the trained parameters, per number of micro-batches.

    Or `record` the kernels in that folder, and return the file.
    """
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
            tuning=tuning,
        )
        state = dp.init(recipe.model(jax.random.key(0)))
        (batch,) = dp.feed(made_up_batch(recipe, ROWS), ROWS)
        if record:
            return {"tuning": str(dp.record_tuning(state, batch, record))}
        for _ in range(2 if tiny else STEPS):
            state, _ = dp.step(state, batch)
        arrays = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)]
        found[f"accumulate={accumulate}"] = hashlib.sha256(b"".join(arrays)).hexdigest()[:12]
    return found


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--digests", action="store_true", help="of this process only")
    parser.add_argument("--record", metavar="FOLDER", help="only write the kernels there")
    parser.add_argument("--tuning", metavar="FILE", help="the kernels to use")
    answer(measure, parser)
