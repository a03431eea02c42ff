"""Sizes of the trial's job, shared by the job and its checks."""

ROWS, BATCH, EPOCHS = 200, 16, 9
EVAL_ROWS = 20
STEPS_OF_AN_EPOCH = -(-ROWS // BATCH)
STEPS = EPOCHS * STEPS_OF_AN_EPOCH
SAVE_EVERY = 10
MICRO_SHARDS = 8
PATIENCE_SECONDS = 1.5
"""After which an island that is silent counts as lost, in trials about that."""
