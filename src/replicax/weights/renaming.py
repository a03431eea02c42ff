"""Places of tensors for `rename=`, besides the paths of leaves: `rx.weights`.

Each function takes a path, or what another of them returned, and goes one step from the leaf
towards the file: `transposed(stacked("layers.kernel"))` is the transpose of one entry of the leaf.
"""

from collections.abc import Sequence

from replicax.errors import ConfigError
from replicax.text.arguments import Natural, typed, typed_but
from replicax.weights.tensor_slices import (
    Joined,
    Part,
    PathOrPlace,
    Rearranged,
    Stacked,
    TensorPlace,
    Tied,
    Transposed,
)


@typed
def transposed(target: PathOrPlace, axes: Sequence[int] = ()) -> TensorPlace:
    r"""Return the place of a tensor that the model has with its dims in another order.

    Args:
        target: a dotted path of a leaf, or a place.
        axes: the tensor's dims in the leaf's order, as for `numpy.transpose`; reversed by default,
            as the weights of PyTorch's linear layers are.

    Examples:
        >>> rename = {r"layers.(\d+).up.weight": rx.weights.transposed(r"layers.\1.up.kernel")}
        >>> convolution = rx.weights.transposed("conv.kernel", (2, 3, 1, 0))
    """
    if sorted(axes) != list(range(len(axes))):
        raise ConfigError(f"axes={list(axes)}; each dim from 0 on must occur once: correct them")
    return Transposed(target, tuple(axes))


@typed_but("sizes")
def rearranged(target: PathOrPlace, pattern: str, **sizes: int) -> TensorPlace:
    r"""Return the place of a tensor whose dims the model has split, merged or in another order.

    Args:
        target: a dotted path of a leaf, or a place.
        pattern: names of the tensor's dims, `->`, and of the leaf's, as in einops; names in
            parentheses share a dim, and 1 is a dim of that size.
        **sizes: sizes of dims that share one of the leaf's.

    Raises:
        ConfigError: a dim is not named once on each side, or its size is missing.

    Examples:
        >>> rename = {
        ...     r"layers.(\d+).q_proj.weight": rx.weights.rearranged(
        ...         r"layers.\1.query.kernel", "(heads dim) width -> width heads dim"
        ...     )
        ... }
    """
    return Rearranged(target, pattern, sizes)


@typed
def stacked(target: PathOrPlace, group: Natural = 1, axis: Natural = 0) -> TensorPlace:
    r"""Return the place of a tensor that is one entry of a leaf, such as of layers under `scan`.

    Args:
        target: a dotted path of a leaf, or a place.
        group: number of the pattern's group whose text is the entry's number.
        axis: the axis of the leaf that the entries are stacked along.

    Examples:
        >>> rename = {r"h.(\d+).ln.weight": rx.weights.stacked("h.ln.weight")}
    """
    return Stacked(target, group, axis)


@typed
def part(
    target: PathOrPlace, number: Natural, sizes: Sequence[Natural], axis: int = -1
) -> TensorPlace:
    r"""Return the place of a tensor that is concatenated with others in a leaf, such as a query.

    Args:
        target: a dotted path of a leaf, or a place.
        number: number of this part, from 0.
        sizes: sizes of all parts along the axis, in proportion: `(1, 1, 1)` for three alike.
        axis: the axis that they are concatenated along.

    Examples:
        >>> rename = {
        ...     f"attn.{name}.weight": rx.weights.part("attn.qkv.kernel", number, (4, 2, 2))
        ...     for number, name in enumerate("qkv")
        ... }
    """
    if number >= len(sizes):
        raise ConfigError(f"number={number} of {len(sizes)} parts; they count from 0: lower it")
    return Part(target, number, tuple(sizes), axis)


@typed
def split(*targets: PathOrPlace, axis: int = 0) -> TensorPlace:
    r"""Return the place of a tensor that the model has as several leaves, in their sizes.

    Args:
        *targets: dotted paths of leaves, or places, in the tensor's order.
        axis: the tensor's axis that they are split along.

    Examples:
        >>> rename = {"attn.qkv.weight": rx.weights.split("attn.q", "attn.k", "attn.v")}
    """
    return Joined(targets, axis)


@typed
def tied(target: PathOrPlace) -> TensorPlace:
    r"""Return the place of a tensor that must equal another one of the file, which fills the place.

    It is not written again, unless the file to write is `like=` one that has it.

    Examples:
        >>> rename = {"wte.weight": "wte.weight", "lm_head.weight": rx.weights.tied("wte.weight")}
    """
    return Tied(target)
