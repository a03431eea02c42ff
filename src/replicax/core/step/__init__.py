"""Step: the mathematics. Rows -> sums of each replica -> one reduction -> one division and update.

Read first `base.py`, the seams by name, and `update.py`, the step itself; then what its sums call:
`accumulate.py` (micro-batches), `objective.py` (sums of a loss and their gradient), `loss.py`
(values a loss may return), `loss_context.py` (`gather` and others, inside a loss) and
`reduction.py` with `coded.py`; then what `apply` calls: `optimizer.py` and `loss_scale.py`.

It imports `errors` and the rooms before it; no mode is known here. Tests: `tests/core/step/`.
Public: `rx.Weighted`, `rx.types.Reduction`, `rx.Coded`, `rx.gather`, `rx.independent`,
`rx.row_weights`, `rx.row_numbers`, `rx.step_number`.
"""
