"""Ground: what every other room stands on, and knows nothing of steps, modes or layouts.

Read in this order:

    train_state.py     `TrainState`, the state of training, and whether its arrays may still be used
    leaves.py          leaves of pytrees: group by dtype, paths, random keys as numbers
    array_table.py     trees of arrays in a few words, and as a table in a notebook
    precision.py       the dtype of the model's computation, and that of sums
    job.py             `Job`, the methods of a job of many processes that the core calls
    largest_places.py  the places of the largest values of each row, and
    codecs.py          float32 vectors as the bytes that are sent
    vectors.py         trees of arrays as vectors, for a codec or a collective
    in_flight.py       the steps that are dispatched and not finished
    quick_compile.py   compiler options for programs that run only a few times
    traced_for.py      the devices that a step is traced for, attached or described
    jax_internals.py   every name that comes from `jax._src`

It imports `errors`, `blocks` when a notebook asks, and nothing else of Replicax. `cluster` may
import this room, and no other of the core. Tests: `tests/core/ground/`. Public: `rx.TrainState`,
`rx.types.Job`.
"""
