"""Lint: find common errors in data-parallel code without running it.

Read `files.py` (all rules on files and folders), `parsed.py` (what the rules are given), then the
rules: `numeric_rules.py`, `lookup.py`, `loops.py`,
`batch_means.py`, `frozen.py`, `ranks.py`; `step_file.py` writes the file that
`replicax verify --step` runs. It may import `errors` and `checks`, nothing else of Replicax, and
never the code that it reads. Tests: `tests/lint/`. Public: `replicax lint` (`docs/lint.md`).
"""
