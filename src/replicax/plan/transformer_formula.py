"""The activations of a transformer by a formula that is used on paper."""

import dataclasses


def transformer_activation_bytes(
    parameter_bytes: float, rows: float, tokens: int, heads: int, head_dim: int, matrices: int = 4
) -> float:
    """M ≈ M_model · B T² / (4 N D²): the attention's scores, in proportion to its weights.

    The attention of a layer has four matrices (of queries, keys, values and the output) of
    (N D)² weights, and its N heads make N T² scores a row: N T² / (4 N² D²) of them for each
    weight. The formula takes that quotient for the whole model.

    It assumes T >> D, so that scores outweigh all else that is stored for the backward pass, that
    they are stored once (softmax and mask may store them more often, and FlashAttention,
    arXiv:2205.14135, never), and that a model is attention alone, without MLP and embedding. It
    leaves out the parameters, their gradient and the optimizer's state. `memory_formula` counts.

    Args:
        parameter_bytes: M_model, of all parameters.
        rows: B.
        tokens: T, of a row.
        heads: N, of each attention.
        head_dim: D, the dims of a head.
        matrices: the 4. A worked example with T = 1024, N = 8, D = 128 that goes round has 8 for
            the quotient, which is that without the 4 (`matrices=1`): 9.6 GB a row for parameters of
            1.2 GB. The formula gives 2, and 2.4 GB.
    """
    return parameter_bytes * rows * tokens**2 / (matrices * heads * head_dim**2)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The sizes that the formula goes by."""

    tokens: int
    """Of a row."""
    heads: int
    """Of each attention."""
    head_dim: int
