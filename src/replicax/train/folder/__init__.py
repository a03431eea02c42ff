"""A run's folder: what a start finds there, compares, and leaves.

`storage.py` opens it and keeps its checkpoints (`saving.py` says how often, `own_states.py` what
each island keeps). `changes.py` compares a start with the one before, by the digests of
`program_fingerprint.py`, and `read_again.py` compares batches. `goodput.py` says how the time was
spent. `load.py` reads the folder of a run that is over. Tests: `tests/train/`.
Public: `rx.Saving`, `rx.load`, `rx.Goodput`.
"""
