"""Files of a run, on a disk or in an object store.

`places.py` reads and writes by name in either; `sealed.py` adds a digest, `lease.py` keeps a second
run out, `records.py` are the lines of `records.jsonl`, `fingerprint.py` digests of a state.
Tests: `tests/train/`. Public: `rx.Record`.
"""
