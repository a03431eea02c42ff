"""Modes: how the parts of a step become a program.

`mode_table.py` has every mode by name. Most build one program for `jax.jit` (`step_builder.py`)
that is mapped onto the mesh (`mapping.py`); `per_replica_sums.py` is `jit` on several GPUs, and
`exact/` calls many programs in a fixed order. Tests: `tests/core/modes/`, and
`tests/core/test_parity.py`, which compares each with one device. Public: `rx.types.Mode`.
"""
