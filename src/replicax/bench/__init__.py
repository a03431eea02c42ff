"""Benchmark a training step in every mode: time, scaling and memory, as tables and plots.

Read `run.py` (`bench`), `cases.py` (which steps), `runner.py` and `measurement.py` (run them in
rounds), `bench_result.py` (figures), `report.py` and `plots.py`; `memory_curve.py` and
`processes.py` are measurements of their own. It may import `core`, `train`, `cluster`, `analysis`
and `recipes`, and no other command. Tests: `tests/bench/`. Public: `rx.bench`, `rx.types.Bench`
(`docs/benchmarks.md`).
"""
