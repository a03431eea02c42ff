"""Between: what a step has to do with other jobs, or with replicas that train on their own.

Read in this order:

    seam.py            `Between`: what the rest asks; by itself, no others and nothing to do
    exchanged_step.py  a step whose batch is shared out among jobs, part by part
    every_step.py      `EveryStep`: this as a `Between`, in float32 or with encoded gradients
    rounds.py          `Rounds`: how often and what islands exchange, if not gradients every step
    arithmetic.py      what an island sends, how it is added, the outer step; pure functions
    transports.py      the same functions over one job's mesh, and between jobs
    every_round.py     `EveryRound`: steps of an island's own, and the exchange when it is due
    choice.py          which of the three it is

Rounds of several steps before parameters are agreed on are DiLoCo (arXiv:2311.08105). It imports
`modes` and the rooms below. Tests: `tests/core/between/`, `tests/core/test_exchanged_step.py`.
Public: `rx.Rounds`.
"""
