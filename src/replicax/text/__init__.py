"""Text: checks of arguments, their error lines, and tables for a terminal or a notebook.

`wording.py` and `table.py` first; `blocks.py` are what a page or a notebook shows, `checks.py` a
list of checks as it is worked off. `arguments.py` checks values that a user gives, `other_names.py`
knows their names in other libraries. `streams.py` prints where a stream may be gone,
`cache_folder.py` and `python_file.py` open a user's files. It imports `errors`, and no other room.
Tests: `tests/text/`. Public: the argument types in `docs/api/types.md`.
"""
