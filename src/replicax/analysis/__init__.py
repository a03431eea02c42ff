"""Analysis of compiled programs: memory, FLOPs, communication, schedule, time; facts on hardware.

Read `compiled.py` (the figures of a step), `hlo.py` (its text), `collectives.py`, `flops.py`,
`kernels.py` and `roofline.py` (lower bounds of time), `schedule.py`, `memory_use.py`;
`low_precision_sums.py` is a check, `hardware.py` reads `hardware.toml`, and `rates.py` what single
kernels reached. It imports `errors` only,
so `train` and all commands may use it. Tests: `tests/analysis/`. Public: nothing.
"""
