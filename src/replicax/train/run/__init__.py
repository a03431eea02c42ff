"""A run: the loop around the step, and all that it opens.

    settings.py         the arguments of a run
    run_parts.py        what is made of them before the run is entered, and nothing is open
    run_state.py        the state and the place of the run, which checkpoints keep
    finished_steps.py   what follows the end of a step: hooks, records, going back
    open_run.py         what is opened, in which order, and how the run ends
    loop.py             batches, steps, evaluations and checkpoints, in order
    fit.py              `Run`, as users and hooks see it, and `fit`, a whole run in one call

Read `loop.py` first, then `open_run.py`. `stopping.py` is where all processes agree, and
`stragglers.py` finds the one that is late; `evaluator.py` scores, `step_records.py` measures,
`summary.py` prints and is the result; with islands, `members.py` says which of them writes. Tests:
`tests/train/`. Public: `rx.Run`, `rx.fit`, `rx.types.Fit`.
"""
