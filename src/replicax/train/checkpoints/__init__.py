"""Checkpoints: written atomically and verified before use.

Read `manifest.py` (contents and checksums), `arrays.py`, `whole.py` and
`with_orbax.py` (a state, as files), `store.py` (list, verify, commit, delete), `saver.py` (all
processes save one, or none does), `orbax_folder.py` (read what Orbax wrote elsewhere). Tests:
`tests/train/`, and damaged and missing files in `tests/chaos/`. Public: `rx.Saving`, how often and
how many (`docs/checkpoints.md`).
"""
