"""Verify that a step gives the same numbers on any number of devices.

`replicax verify` and `rx.verify` begin in `verify_program.py`, for a loss or a step of Replicax;
`rx.verify_step` in `step.py`, for a step that is written by hand. Both run cases beside one device
(`program_trial.py`, `trial.py`; that of a program is plain JAX, `plain.py`), compare
(`difference.py`, `step_parity.py`), look for the cause of a difference (`causes.py`), and return a
`Verification`, a row per check (`verification.py`).
It may import `core`, `train`, `cluster`, `analysis` and `recipes`, and no other command;
`verified.py`, above, hands it the compilers of `plan`. Tests: `tests/verify/`. Public: `rx.verify`,
`rx.verify_step`, `rx.types.Verification` (`docs/verify.md`).
"""
