"""Known wrong: versions of packages that compute wrong numbers, and what is done about each.

The table is data, in `versions.toml`; no other room knows a version. Read `known_table.py`, what a
row is and which ones concern this process; `self_tests.py`, small programs that compute the wrong
number; `avoidance.py`, compiler options with which it is right; `findings.py`, what is said and
refused.

It imports `errors`. `core` compiles its programs with `avoiding` and asks `refuse_known_wrong`;
`fit`, `verify` and `doctor` say the rest. Tests: `tests/known_wrong/`. Public: nothing.
"""
