"""A run: `fit.py` (`Run`, and `fit`, a whole run in one call), and the loop around the step.

Read `fit.py`, `loop.py`, `run_state.py`, then `resuming.py` and `stopping.py`. `evaluator.py`
scores, `step_records.py` measures, `summary.py` prints and is the result; with islands,
`members.py` says which of them writes. Tests: `tests/train/`. Public: `rx.Run`, `rx.fit`, `rx.Fit`.
"""
