"""The shared job of the six programs: data, initial weights, and output of the final weights.

Rows are sequences of `LENGTH` labeled vectors; a mask selects the first few of them. The
loss is the mean cross-entropy of the selected vectors. The environment selects the variant:
`ROWS`, `MASKED=1`, `ACCUMULATE`, `EPOCHS`, `OUT` (a `.npz`), `FOLDER` for checkpoints, `PAUSE`
(seconds that a loader takes for a batch), and in a job of several processes `RANK`, `WORLD_SIZE`,
`MASTER_ADDR` and `MASTER_PORT`.
"""

import os
import time

import numpy as np

ROWS = int(os.environ.get("ROWS", "960"))
MASKED = bool(os.environ.get("MASKED"))
ACCUMULATE = int(os.environ.get("ACCUMULATE", "1"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))
FOLDER = os.environ.get("FOLDER")
RANK = int(os.environ.get("RANK", os.environ.get("REPLICAX_PROCESS_ID", "0")))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
COORDINATOR = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
BATCH, LENGTH, WIDTH, HIDDEN, CLASSES, RATE = 64, 8, 16, 32, 4, 0.5


def data() -> dict[str, np.ndarray]:
    """`x` `[rows, LENGTH, WIDTH]`, `label` and `mask` `[rows, LENGTH]`."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    label = (x @ draw.normal(size=(WIDTH, CLASSES))).argmax(-1).astype(np.int32)
    lengths = draw.integers(1, LENGTH + 1, ROWS) if MASKED else np.full(ROWS, LENGTH)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    return {"x": x, "label": label, "mask": mask}


def weights() -> list[np.ndarray]:
    """`[WIDTH, HIDDEN]`, `[HIDDEN]`, `[HIDDEN, CLASSES]`, `[CLASSES]`."""
    draw = np.random.default_rng(1)
    first = draw.normal(size=(WIDTH, HIDDEN)) / WIDTH**0.5
    second = draw.normal(size=(HIDDEN, CLASSES)) / HIDDEN**0.5
    arrays = first, np.zeros(HIDDEN), second, np.zeros(CLASSES)
    return [np.asarray(array, np.float32) for array in arrays]


def pause() -> None:
    """Simulate a loader's delay per batch if PAUSE is set, and print the rank."""
    if "PAUSE" in os.environ:
        time.sleep(float(os.environ["PAUSE"]))
        print(f"batch of {RANK} pid {os.getpid()} ", flush=True)


def save(arrays: list) -> None:
    """Write the weights in process 0."""
    if RANK == 0:
        np.savez(os.environ["OUT"], *[np.asarray(array) for array in arrays])
