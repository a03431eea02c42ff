"""A run's folder: what a start finds there, compares, and leaves.

`storage.py` has what a run asks of its folder, and what each island keeps (`saving.py` says how
often); `written_folder.py` opens the folder and keeps its checkpoints, `followed_folder.py` waits
for the island that does. `changes.py` compares a start with the one before, by the digests of
`program_fingerprint.py`, and `read_again.py` compares batches. `goodput.py` says how the time was
spent. `load.py` reads the folder of a run that is over. Tests: `tests/train/`.
Public: `rx.Saving`, `rx.load`, `rx.Goodput`.
"""
