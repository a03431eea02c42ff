r"""Weights of other libraries: `rx.load_weights`, `rx.save_weights`, and what a name stands for.

Both take a table, `rename`: patterns of a file's names, and for each the dotted path of a leaf of
the model, or one of the functions here. Read in this order:

    tensor_slices.py    the part of a leaf that a tensor fills: a view, which is read or written
    renaming.py         the functions here, which make them
    rename_table.py     the rule for a name, and the names of a model, from the same table
    model_leaves.py     leaves of a model by name, and a model with others
    tensor_files.py     files of tensors: safetensors, in shards too, torch's, and folders
    load_weights.py, save_weights.py   the two verbs

It imports `errors`, `text`, `core` and `train`. Tests: `tests/weights/`.
"""

from replicax.weights.renaming import part as part
from replicax.weights.renaming import rearranged as rearranged
from replicax.weights.renaming import split as split
from replicax.weights.renaming import stacked as stacked
from replicax.weights.renaming import tied as tied
from replicax.weights.renaming import transposed as transposed
