"""Optimizers for the matrices of a model, each updated whole by one owner, and for the rest."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax

from replicax.core.ground.leaves import PyTree, by_path
from replicax.core.placement.matrix_owners import by_owner
from replicax.core.placement.matrix_slots import MatrixDims
from replicax.errors import ConfigError
from replicax.text.arguments import answered

__all__ = ["by_matrix", "muon"]

Matrices = str | Sequence[str] | Mapping[str, tuple[Any, Any] | None]
"""Regexes searched in the paths of parameters, or those and the dims of rows and columns."""

_MATRIX, _REST = "matrix", "rest"
_NO_HIDDEN = re.compile(r"embed|\bw[tp]e\b|head\b|vocab|logit", re.IGNORECASE)
_VECTOR = re.compile(r"bias|scale|norm|gamma|beta", re.IGNORECASE)
_HOLDERS = {"value", "raw_value"}  # of a variable, at the end of a path


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
        >>> optimizer = rx.optimizers.by_matrix(hidden, r"\['kernel'\]", rest=optax.adamw(3e-4))

    Args:
        transform: an optimizer of one array `[rows, columns]`.
        matrices: one or more regexes, searched in the paths of parameters; or a mapping of them to
            the dims of a matrix's rows (inputs) and columns (outputs), each a number or several:
            `(1, 0)` for Equinox's `[outputs, inputs]`. Other dims are a stack. Without dims, or if
            they are None, these are the last two of `[rows, columns]` or `[stack, rows, columns]`;
            vectors, stacks of them beside stacks of matrices, and what is called bias, scale, norm,
            gamma or beta are left to `rest`.
        rest: the optimizer of the other parameters.
        owners: number of owners; with a layout that splits the optimizer state, a multiple of the
            number of devices. Results do not depend on it.

    Raises:
        ConfigError: no matrices are named, or one that matches is an embedding or a head.
    """
    for name, given in (("transform", transform), ("rest", rest)):
        if not (hasattr(given, "init") and hasattr(given, "update")):
            raise ConfigError(
                f"{name}={given!r} is no optax.GradientTransformation: call optax.adamw(...), for "
                "example"
            )
    if isinstance(owners, bool) or not isinstance(owners, int) or owners < 1:
        raise ConfigError(f"owners={owners!r}; it must be an integer of at least 1: change it")
    named = _by_regex(matrices)

    def labels(params: PyTree) -> PyTree:
        dims = _dims(params, named).values()
        found = [_REST if each is None else _MATRIX for each in dims]
        return jax.tree.unflatten(jax.tree.structure(params), found)

    def dims_of(tree: PyTree) -> list[MatrixDims]:
        return [dims for dims in _dims(tree, named).values() if dims is not None]

    hidden = by_owner(transform, dims_of, owners=owners)
    return optax.partition({_MATRIX: hidden, _REST: rest}, labels)


@answered
def muon(
    learning_rate: optax.ScalarOrSchedule,
    matrices: Matrices | None = None,
    *,
    rest: optax.GradientTransformation | None = None,
    weight_decay: float = 0.0,
    beta: float = 0.95,
    eps: float = 1e-8,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adaptive: bool = False,
    consistent_rms: float | None = None,
    mu_dtype: Any = None,
    owners: int = 8,
) -> optax.GradientTransformation:
    r"""Return Muon for the matrices that are named, and `rest` for all other parameters.

    The numbers are those of `optax.contrib.muon` on each matrix by itself, also where a leaf is a
    stack of them, as `[layers, rows, columns]` of a model that scans over its layers. (By rank, as
    `optax.contrib.muon` chooses by default, a stack of matrices would go to Adam and a stack of
    biases to Muon.)

    Examples:
        >>> optimizer = rx.optimizers.muon(0.02, r"\['blocks'\].*kernel", rest=optax.adamw(3e-4))

    Args:
        learning_rate: of the matrices, and of `rest` unless it is given.
        matrices: as in `rx.optimizers.by_matrix`.
        rest: the optimizer of the other parameters; by default that of `optax.contrib.muon`,
            `optax.adamw` with this learning rate, `nesterov` and no weight decay.
        weight_decay: of the matrices, times the learning rate.
        beta: decay of the momentum.
        eps: added to the norm of a matrix; also that of the default `rest`.
        nesterov: Nesterov momentum; also in the default `rest`.
        ns_steps: Newton-Schulz iterations.
        ns_coeffs: their three coefficients, or those of each; or the name of a preset of optax.
        preconditioning: what a matrix is divided by: `frobenius`, `spectral`, `aol`, `schatten`.
        adaptive: scale updates by their dual norm.
        consistent_rms: scale them by `consistent_rms * sqrt(max(rows, columns))`, such as 0.2,
            instead of `sqrt(max(1, columns / rows))`.
        mu_dtype: of the momentum; by default that of the parameters.
        owners: as in `rx.optimizers.by_matrix`.

    Raises:
        ConfigError: as `rx.optimizers.by_matrix`.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    shared = {"eps": eps, "nesterov": nesterov, "mu_dtype": mu_dtype}
    one = optax.contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        beta=beta,
        ns_steps=ns_steps,
        ns_coeffs=ns_coeffs,
        preconditioning=preconditioning,
        adaptive=adaptive,
        consistent_rms=consistent_rms,
        **shared,
    )
    if rest is None:
        rest = optax.adamw(learning_rate, weight_decay=0.0, **shared)
    return by_matrix(one, matrices, rest=rest, owners=owners)


def _by_regex(matrices: Any) -> dict[str, Any] | None:
    """Return the dims that each regex is given, if any."""
    if matrices is None:
        return None
    each = [matrices] if isinstance(matrices, str) else matrices
    try:
        found = dict(each) if isinstance(each, Mapping) else dict.fromkeys(each)
        for regex in found:
            re.compile(regex)
    except (TypeError, re.error) as error:
        raise ConfigError(
            f"matrices={matrices!r} is no regex, list of them, or mapping of them to dims "
            f"({error}): fix it"
        ) from error
    return found


def _dims(params: PyTree, regexes: Mapping[str, Any] | None) -> dict[str, MatrixDims | None]:
    """Return the dims of the matrices of each parameter, by path; None if it has none."""
    if regexes is None:
        raise ConfigError(_unnamed(params))
    shapes = {path: np.shape(leaf) for path, leaf in by_path(params).items()}
    named = {
        path: next((each for each in regexes if re.search(each, path)), None) for path in shapes
    }
    stacks = {
        (regex, shapes[path][0])
        for path, regex in named.items()
        if regex is not None and regexes[regex] is None and len(shapes[path]) > 2
    }
    found = dict[str, MatrixDims | None]()
    for path, regex in named.items():
        shape, given = shapes[path], None if regex is None else regexes[regex]
        is_vector = len(shape) < 2 or bool(_VECTOR.search(_last_name(path)))
        is_vector |= len(shape) == 2 and (regex, shape[0]) in stacks
        if regex is None or (is_vector and given is None) or not math.prod(shape):
            found[path] = None
        else:
            found[path] = _dims_of(path, shape, given)
    if not any(found.values()):
        raise ConfigError(f"matrices={[*regexes]!r} matches no matrix. {_unnamed(params)}")
    return found


def _last_name(path: str) -> str:
    return next((name for name in re.findall(r"\w+", path)[::-1] if name not in _HOLDERS), "")


def _dims_of(path: str, shape: Sequence[int], dims: Any) -> MatrixDims:
    rank = len(shape)
    if dims is None:
        if rank not in (2, 3):
            raise ConfigError(
                f"{path} of shape {list(shape)} has {rank} dims; 2 or 3 are a matrix or a stack: "
                f"write matrices={{{re.escape(path)!r}: (rows, columns)}} with their dims, or "
                "leave it out"
            )
        if _NO_HIDDEN.search(path):
            raise ConfigError(
                f"{path} seems to be an embedding or a head, and no hidden matrix: leave it out, "
                f"or write matrices={{{re.escape(path)!r}: ({rank - 2}, {rank - 1})}} if it is "
                "meant"
            )
        dims = rank - 2, rank - 1
    pair = tuple(dims) if isinstance(dims, Sequence) else ()
    both = [tuple(each) if isinstance(each, Sequence) else (each,) for each in pair]
    every = [dim for each in both for dim in each]
    whole = all(type(dim) is int and 0 <= dim < rank for dim in every)
    if len(both) != 2 or not all(both) or not whole or len({*every}) < len(every):
        raise ConfigError(
            f"dims {dims} of {path} of shape {list(shape)}; they are (rows, columns), each one or "
            f"several different dims from 0 to {rank - 1}: change them"
        )
    return MatrixDims(*both)


def _unnamed(params: PyTree) -> str:
    hidden = [
        path
        for path, leaf in by_path(params).items()
        if len(np.shape(leaf)) > 1
        and not (_NO_HIDDEN.search(path) or _VECTOR.search(_last_name(path)))
    ]
    some = ", ".join(hidden[:3]) or "none"
    fix = "use another optimizer"
    if hidden:
        fix = f"name the hidden matrices, for example matrices={re.escape(hidden[0])!r}"
    return (
        "parameters with two or more dims that are no embeddings are "
        f"{some} ({len(hidden)} in all): {fix}"
    )
