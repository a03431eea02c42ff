"""The trial job's numbers, known to it and to who judges it."""

ROWS, FEATURES, BATCH, EPOCHS = 52, 8, 8, 4
EVAL_ROWS = 20
STEPS_OF_AN_EPOCH = -(-ROWS // BATCH)
STEPS = EPOCHS * STEPS_OF_AN_EPOCH
SAVE_EVERY = 5
KEEP = 3
MAX_BAD_STEPS = 3
DEVICES = 2
"""Of each process."""
COUNT_BASE = 4
"""A row that a step used in epoch e adds COUNT_BASE ** e to its count."""
SEEN_ONCE_AN_EPOCH = sum(COUNT_BASE**epoch for epoch in range(EPOCHS))
DATA = ("plain", "nan-one", "nan-all")
BAD_ROW = 20
"""The row with a NaN in `nan-one`; the batch that begins there has one in each row in `nan-all`."""
