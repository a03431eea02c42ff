"""Observers of a run: progress, curves, figures, watching a metric, audits, profiles, loggers.

`hook.py` is their protocol; the loop knows none by name. `logger.py` is the base of loggers, which
work in a thread of their own; those in `tensorboard.py` and `trackers.py` import their libraries
when used. Tests: `tests/train/`. Public: `rx.Hook`, and all that a user passes, such as
`rx.hooks.KeepBest` and `rx.hooks.TensorBoard` (`docs/hooks.md`).
"""
