"""Hooks that a user passes to a run: figures, watching a metric, profiles, loggers.

`hook.py`, one folder up, is their protocol. `logger.py` is the base of loggers, which work in a
thread of their own; those in `tensorboard.py` and
`trackers.py` import their libraries when used. Tests: `tests/train/`.
Public: all of them, such as `rx.KeepBest` and `rx.TensorBoard` (`docs/hooks.md`).
"""
