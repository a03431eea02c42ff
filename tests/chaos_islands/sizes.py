"""Sizes of the trial's job, shared by the job and its checks."""

ROWS, FEATURES, BATCH, EPOCHS = 200, 8, 16, 9
EVAL_ROWS = 20
STEPS_OF_AN_EPOCH = -(-ROWS // BATCH)
STEPS = EPOCHS * STEPS_OF_AN_EPOCH
KEEP = 3
COUNT_BASE = 4
"""A step in epoch e adds COUNT_BASE ** e to the count of each of its rows."""
SEEN_ONCE_AN_EPOCH = sum(COUNT_BASE**epoch for epoch in range(EPOCHS))
MICRO_SHARDS = 8
