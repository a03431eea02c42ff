"""Between islands: what a step exchanges with other jobs, every step or every few.

Read in this order:

    exchanged_step.py  a step whose batch is shared out among jobs, part by part
    coded_sums.py      the same with encoded gradients
    islands.py         `Islands`: how often and what islands exchange, if not gradients every step
    arithmetic.py      what an island sends, how it is added, the outer step; pure functions
    transports.py      the same functions over one job's mesh, and between jobs
    round_step.py      `RoundStep`: steps of an island's own, and the exchange when it is due

Rounds of several steps before parameters are agreed on are DiLoCo (arXiv:2311.08105). It imports
`modes` and the rooms below. Tests: `tests/core/between/`, `tests/core/test_exchanged_step.py`.
Public: `rx.Islands`.
"""
