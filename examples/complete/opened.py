"""What `train.py` left, with Orbax alone: `python opened.py runs/fraud` prints the newest weights.

Replicax is not imported, and need not be installed; nor need there be the devices of the run.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp


def newest(run_dir):
    """The newest step of a run, and its parameters as NumPy arrays."""
    folder = Path(run_dir).absolute() / "checkpoints"
    with ocp.CheckpointManager(folder, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        step = manager.latest_step()
        tree = manager.item_metadata(step).tree
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found = manager.restore(step, args=ocp.args.PyTreeRestore(restore_args=on_host))
    return step, found["params"]


def main(run_dir):
    step, params = newest(run_dir)
    print(f"step {step}")
    for path, array in jax.tree.leaves_with_path(params):
        print(jax.tree_util.keystr(path, simple=True, separator="."), array.shape, array.dtype)


if __name__ == "__main__":
    main(*sys.argv[1:])
