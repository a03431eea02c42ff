"""First step: what is checked before a loss, a step or a state is used.

Read in this order:

    argument_checks.py   the kinds of arguments: a loss, an optimizer, a state
    memory_check.py      a state, and then a compiled step, fits in free memory
    examiner.py          trace a loss or a step as for one device, so that its rows can be followed
    step_run.py          a custom step, with its rows, those of its state, or one of its sets
    loss_check.py        is a value the same if replicas, micro-batches or padding see some rows?
    trial_inputs.py      other parameters, rows, masks and step numbers
    row_gradients.py     gradients with padding, and of the real rows alone
    row_trials.py        if it is not, or the trace does not tell: compare numbers
    rank_rules.py        does the optimizer choose by rank what a scan stacks?
    row_errors.py        one line that names the value and what to write

`jaxprs` has the rules; this room knows what a loss is. `call_checks.py`, above, calls it, and
`per_replica_sums.py` uses its answer. It imports `errors` and the rooms up to `custom`. Tests:
`tests/core/first_step/`. Public: nothing but errors, as `rx.errors.LossError` (`docs/rows.md`).
"""
