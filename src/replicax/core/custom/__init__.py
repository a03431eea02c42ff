"""Custom: a step that the user writes, over any pytree of state.

`custom_step.py` runs it, with `rx.ByRow` in its state and its metrics; `summing.py` has
`rx.value_and_grad` and `rx.mean`, which sum and divide by the same code as the built-in step;
`known_gradient.py` which of their derivatives are known.

It imports `errors`, `arguments` and the rooms before it, `step` last. Tests: `tests/core/custom/`.
Public: `rx.mean`, `rx.value_and_grad`.
"""
