"""Plan memory and speed of a step on hardware that is described rather than attached.

Read `planner.py` (`plan`), `target.py` (the hardware), `steps.py` (steps of any size, compiled by
`compiler.py` if the platform's compiler is installed, else by `memory_formula.py`), `speed.py` and
`forecast.py`, `largest.py`, `calibrated.py` and `advice.py` (changes by formula),
`island_exchange.py`; `slow_links.py` (every method over `site_network.py`); `planned.py` has the
records, `plan_table.py` the screen. `failures.py` stands alone. It may import `core`, `train`,
`cluster`, `islands`, `analysis` and `recipes`, and no other command. Tests:
`tests/plan/`. Public: `rx.plan`, `rx.types.Plan` (`docs/plan.md`).
"""
