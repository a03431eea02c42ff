"""Models: split a model of any kind into parameters and other arrays, and merge them again.

Read in this order:

    definition.py   `Definition`: how a kind of model is split, called and rebuilt, and what a call
                    is told (`CallContext`)
    stateful.py     functions that return the state they write
    pytree.py       plain pytrees, and the state of a custom step
    equinox.py, linen.py, nnx.py   modules of these libraries
    training_mode.py  training and inference mode of NNX and Equinox models
    metric_objects.py   metrics of these libraries that can be merged
    leaf_checks.py  range of all arrays of a model, and the dtype of those that train
    split.py        which of these a model is; what is none, such as an optimizer, is refused

The libraries are imported only if a model is of them. A new kind is a file, and a case in `split`.
The room imports `errors`, `ground` and `placement`, and may import `jaxprs` and `data`. Tests:
`tests/core/models/`. Public: `rx.Stateful`, `rx.NewState`; `dp.model(state)` merges.
"""
