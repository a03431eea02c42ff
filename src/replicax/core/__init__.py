"""The mathematics of a training step, and its mapping onto devices.

`dp.step(state, batch)` enters these files and rooms, in this order:

    data_parallel.py       the call: place the batch, check, run the program, note it as in flight;
                           `several_steps.py` the call of several
    call_checks.py   before every step, and with `first_step/` for new shapes: is this loss
                           on parts of a batch what it is on the whole, do processes agree, and the
                           first time, does it fit
    batch_placement.py     rows of a user's -> a padded batch on the devices
    program.py             a configuration (`config.py`) and a model (`models/`) on a mesh: the
                           parts of its step, and the state before it
    modes/                 how the step is built from its parts: by default one `jax.jit` program,
                           `exact/` of many whose order fixes bits
    between/               the same sums, if other jobs compute some of them, or rounds of steps
                           before all agree
    step/                  rows -> sums -> one reduction -> one division -> one optimizer update
    custom/                the same sums, called by a step of the user's
    placement/, data/      where the arrays of the state lie, and the rows of the batch
    pipeline/              the same sums, if the layout has stages

`evaluation.py` is the same walk without an update: sums for `dp.evaluate`, rows for `dp.predict`.
To read this room, begin with `step/`, in the order that it gives: its `update.py` is the step.

Each room and file imports those before it: ground, jaxprs, data, placement, models, step, custom,
pipeline, first_step, modes, between, config, batch_placement, program, call_checks,
evaluation, several_steps, state_summary, data_parallel. From the rest of Replicax they import
`errors`, `text` and `known_wrong`; from elsewhere jax, numpy and optax, and a model's
library where a model is of it.
`tests/test_architecture.py` holds this, and `tests/core/` the rest, with a folder for each room;
`test_parity.py` and `test_layout_parity.py` there compare every mode and layout with one device.

Public are the names that `replicax` itself has, such as `rx.DataParallel`, and its modules, as
`rx.types.Mode`. Paths of modules may change, as the changelog says.
"""
