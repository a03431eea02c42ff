"""Doctor: checks of a machine, an installation and a job, with findings, verdicts and fixes.

Read `examination.py`, which runs all checks in one order; then the checks: `installation.py`,
`device_checks.py`, `known_numbers.py`, `shared_folders.py`, `joined.py`, `between.py`,
`between_islands.py`; `combined.py` merges those of several processes. A finding is of `checks.py`,
above. It imports no other command. Tests: `tests/doctor/`. Public: `replicax doctor`.
"""
