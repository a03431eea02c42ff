"""Optimizers for the matrices of a model, each updated whole by one owner, and for the rest."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from replicax.core.ground.leaves import PyTree, by_path
from replicax.core.placement.matrix_owners import by_owner
from replicax.core.placement.matrix_slots import MatrixDims
from replicax.errors import ConfigError
from replicax.text.arguments import answered

Matrices = str | Sequence[str] | Mapping[str, tuple[Any, Any] | None]
"""Regexes searched in the paths of parameters, or those and the dims of rows and columns."""

_MATRIX, _REST = "matrix", "rest"
_NO_HIDDEN = re.compile(r"embed|\bw[tp]e\b|head\b|vocab|logit", re.IGNORECASE)
_VECTOR = re.compile(r"bias|scale|norm|\bln_", re.IGNORECASE)


@answered
def by_matrix(
    transform: optax.GradientTransformation,
    matrices: Matrices | None = None,
    *,
    rest: optax.GradientTransformation,
    owners: int = 8,
) -> optax.GradientTransformation:
    r"""Return an optimizer that needs whole matrices, for those that are named, and `rest`.

    `transform` is applied to each matrix by itself, also where a leaf is a stack of them. Where the
    layout splits the optimizer state, each matrix has one owner, which keeps its state and does its
    update.

    Examples:
        >>> one = optax.contrib.scale_by_muon(ns_steps=3)
        >>> hidden = optax.chain(one, optax.scale_by_learning_rate(0.02))
        >>> optimizer = rx.by_matrix(hidden, r"\['kernel'\]", rest=optax.adamw(3e-4))

    Args:
        transform: an optimizer of one array `[rows, columns]`.
        matrices: one or more regexes, searched in the paths of parameters; or a mapping of them to
            the dims of a matrix's rows (inputs) and columns (outputs), each a number or several:
            `(1, 0)` for Equinox's `[outputs, inputs]`. Other dims are a stack. Without dims, or if
            they are None, these are the last two of `[rows, columns]` or `[stack, rows, columns]`;
            vectors, stacks of them beside stacks of matrices, and what is called bias, scale or
            norm are left to `rest`.
        rest: the optimizer of the other parameters.
        owners: number of owners; with a layout that splits the optimizer state, a multiple of the
            number of devices. Results do not depend on it.

    Raises:
        ConfigError: no matrices are named, or one that matches is an embedding or a head.
    """

    def labels(params: PyTree) -> PyTree:
        dims = _dims(params, matrices).values()
        found = [_REST if each is None else _MATRIX for each in dims]
        return jax.tree.unflatten(jax.tree.structure(params), found)

    def dims_of(tree: PyTree) -> list[MatrixDims]:
        return [dims for dims in _dims(tree, matrices).values() if dims is not None]

    hidden = by_owner(transform, dims_of, owners=owners)
    return optax.partition({_MATRIX: hidden, _REST: rest}, labels)


@answered
def muon(
    learning_rate: optax.ScalarOrSchedule,
    matrices: Matrices | None = None,
    *,
    rest: optax.GradientTransformation | None = None,
    weight_decay: float = 0.0,
    owners: int = 8,
    **options: Any,
) -> optax.GradientTransformation:
    r"""Return Muon for the matrices that are named, and `rest` for all other parameters.

    The numbers are those of `optax.contrib.muon` on each matrix by itself, also where a leaf is a
    stack of them, as `[layers, rows, columns]` of a model that scans over its layers. (By rank, as
    `optax.contrib.muon` chooses by default, a stack of matrices would go to Adam and a stack of
    biases to Muon.)

    Examples:
        >>> optimizer = rx.muon(0.02, r"\['blocks'\].*kernel", rest=optax.adamw(3e-4))

    Args:
        learning_rate: of the matrices, and of `rest` unless it is given.
        matrices: as in `rx.by_matrix`.
        rest: the optimizer of the other parameters; by default that of `optax.contrib.muon`,
            `optax.adamw(learning_rate, weight_decay=0, nesterov=True)`.
        weight_decay: of the matrices, times the learning rate.
        owners: as in `rx.by_matrix`.
        options: others of `optax.contrib.muon` for matrices, such as `beta`, `ns_steps`,
            `nesterov`, `mu_dtype` and `consistent_rms`.

    Raises:
        ConfigError: as `rx.by_matrix`.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    one = optax.contrib.muon(learning_rate, weight_decay=weight_decay, **options)
    if rest is None:
        rest = optax.adamw(learning_rate, weight_decay=0.0, nesterov=True)
    return by_matrix(one, matrices, rest=rest, owners=owners)


def _dims(params: PyTree, matrices: Matrices | None) -> dict[str, MatrixDims | None]:
    """Return the dims of the matrices of each parameter, by path; None if it has none."""
    if matrices is None:
        raise ConfigError(_unnamed(params))
    regexes: Mapping[str, Any]
    if isinstance(matrices, str):
        regexes = {matrices: None}
    else:
        regexes = matrices if isinstance(matrices, Mapping) else dict.fromkeys(matrices)
    leaves = by_path(params)
    named = {
        path: next((each for each in regexes if re.search(each, path)), None) for path in leaves
    }
    stacks = {
        (regex, leaves[path].shape[0])
        for path, regex in named.items()
        if regex and not regexes[regex] and len(leaves[path].shape) > 2
    }
    found = dict[str, MatrixDims | None]()
    for path, regex in named.items():
        shape = leaves[path].shape
        is_vector = (
            len(shape) < 2
            or _VECTOR.search(path)
            or (len(shape) == 2 and (regex, shape[0]) in stacks)
        )
        if regex is None or (is_vector and not regexes[regex]):
            found[path] = None
        else:
            found[path] = _dims_of(path, shape, regex, regexes[regex])
    if not any(found.values()):
        raise ConfigError(f"matrices={matrices!r} matches no parameter. {_unnamed(params)}")
    return found


def _dims_of(path: str, shape: Sequence[int], regex: str, dims: Any) -> MatrixDims:
    rank = len(shape)
    if dims is None:
        if rank not in (2, 3):
            raise ConfigError(
                f"{path} of shape {list(shape)} has {rank} dims; 2 or 3 are a matrix or a "
                f"stack: write matrices={{{regex!r}: (rows, columns)}} with their dims, or leave "
                "it out"
            )
        if _NO_HIDDEN.search(path):
            raise ConfigError(
                f"{path} seems to be an embedding or a head, and no hidden matrix: leave it "
                f"out, or write matrices={{{regex!r}: ({rank - 2}, {rank - 1})}} if it is meant"
            )
        dims = rank - 2, rank - 1
    rows, columns = (tuple(each) if isinstance(each, Sequence) else (each,) for each in dims)
    every = [*rows, *columns]
    if len({*every}) < len(every) or not all(dim in range(rank) for dim in every):
        raise ConfigError(
            f"rows {rows} and columns {columns} of {path} of shape {list(shape)}; they "
            f"must be different dims from 0 to {rank - 1}: change them"
        )
    return MatrixDims(rows, columns)


def _unnamed(params: PyTree) -> str:
    hidden = [
        path
        for path, leaf in by_path(params).items()
        if len(leaf.shape) > 1 and not (_NO_HIDDEN.search(path) or _VECTOR.search(path))
    ]
    some = ", ".join(hidden[:3]) or "none"
    line = f"matrices={re.escape(hidden[0])!r}" if hidden else "another optimizer"
    return (
        f"parameters with two or more dims that are no embeddings are {some} "
        f"({len(hidden)} in all): name the hidden matrices, for example {line}"
    )
