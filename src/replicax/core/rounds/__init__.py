"""Rounds: islands take several steps of their own, then agree on new parameters (DiLoCo).

Read in this order:

    islands.py         `Islands`, how often and what islands exchange
    arithmetic.py      what an island sends, how it is added, the outer step; pure functions
    transports.py      the same functions over one job's mesh, and between jobs
    round_step.py      `RoundStep`: steps of an island's own, and the exchange when it is due

    coded_sums.py      without rounds: encoded gradients in every step

It imports the rooms below `exact` and `exchanged_step`. Tests: `tests/core/rounds/`. Public:
`rx.Islands`.
"""
