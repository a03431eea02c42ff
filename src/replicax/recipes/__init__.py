"""Recipes: complete training jobs, each in one file, read from top to bottom.

Begin with `linear_regression.py`, then `mlp.py` (Linen), `cnn.py` (NNX), `lenet.py` and `gpt2.py`.
`recipe.py` is the protocol: a frozen dataclass, whose fields are hyperparameters and flags. Data is
in `datasets.py`, `text.py` with `corpus.py`, `text_columns.py` and `tokenizer.py`. Recipes import
`replicax` as users do, and a few helpers of `core`. Tests: `tests/recipes/`. Public: their names on
the command line, and `file.py:Name` for a recipe of your own (`docs/training.md`).
"""
