"""Train: the loop around the step, which gives batches, evaluates, saves and resumes.

Read `fit.py` (`Run`, and `fit`, a whole run in one call), `loop.py`, `run_state.py`, `hook.py`,
`dispatched.py`; then `storage.py` for a run's folder, and `checkpoints/` for its states. With
islands, `members.py` says which of them writes. Observers of a run are hooks: those in `hooks/`,
`audit.py`, `noise_scale.py`, `curves.py` with `drawing.py`, `progress.py` with `loss_curve.py`; the
loop knows none by name. It may import `core`, `cluster`, `islands` and `analysis`, and no command.
Tests: `tests/train/`, and kills in `tests/chaos/`. Public: `rx.fit`, `rx.Run`, `rx.Hook`, the hooks
and loggers (`docs/run.md`, `docs/hooks.md`).
"""
