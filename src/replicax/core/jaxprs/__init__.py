"""Jaxprs: read a traced function, and follow the rows of a batch through it.

Read in this order:

    jaxpr.py            evaluate, inline and prune a jaxpr
    linear.py           whether results are linear in some inputs, such as cotangents
    row_rules.py        where each primitive leaves rows that are still separate
    row_padding.py      what padded rows hold, and whether it counts
    row_counts.py       values of all rows: sums, means, counts, positions
    row_labels.py       names of functions that say where rows are
    row_inner.py        loops, branches, solvers and derivatives that code defines
    padding_values.py   the number on padding after an elementwise operation, and signs
    padding_rules.py    where each primitive leaves padding
    row_dependence.py   `Follow`: those above, applied to two traces side by side
    row_causes.py       which operations mixed the rows, and on which lines
    symbol_rules.py     hashes of expressions, and rules for combining them
    row_symbols.py      rows that were moved: equal expressions in the whole and in its parts
    row_evaluation.py   evaluate a trace on numbers, with some of its values replaced

The rules know nothing of losses; `first_step` asks them about losses, `exact` about elementwise
operations, `pipeline` about residuals. The room imports `errors`, and may import `ground`.
Tests: `tests/core/jaxprs/`, and for whole losses `tests/core/first_step/`. Public: nothing;
`docs/rows.md` describes what users see of it.
"""
