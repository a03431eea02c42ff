"""Sizes of the trial's job, shared by the job and its checks."""

ROWS, BATCH, EPOCHS = 52, 8, 4
EVAL_ROWS = 20
STEPS_OF_AN_EPOCH = -(-ROWS // BATCH)
STEPS = EPOCHS * STEPS_OF_AN_EPOCH
SAVE_EVERY = 5
MAX_BAD_STEPS = 3
DEVICES = 2
"""Devices of each process."""
DATA = ("plain", "nan-one", "nan-all")
BAD_ROW = 20
"""The row that is NaN in `nan-one`; `nan-all` has a NaN in each row of the batch from there."""
