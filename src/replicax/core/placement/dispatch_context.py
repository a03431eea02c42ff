"""Run a step undisturbed by the caller's meshes, settings and other threads."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from replicax.core.ground.in_flight import InFlight
from replicax.core.ground.train_state import check_outside_jit
from replicax.core.placement.mesh import AnyMesh
from replicax.errors import ConfigError
from replicax.text.arguments import bind, with_signature

_NO_MESH = Mesh(np.empty((), object), ())


Context = contextlib.AbstractContextManager[Any]


def in_own_mesh(mesh: AnyMesh, *, named: bool) -> Context:
    """Return a context to trace programs on `mesh`.

    Within `jax.set_mesh`, JAX would take their arrays for ones of the caller's mesh. If that is
    `mesh` itself and `named`, it stays: a loss may then name its axes.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.empty or (named and around == getattr(mesh, "abstract_mesh", mesh)):
        return contextlib.nullcontext()
    return _without_mesh()


def dispatch_context(mesh: AnyMesh, in_flight: InFlight, named: bool, compiled: bool) -> Context:
    """Return a context to trace and dispatch programs on `mesh`: `in_own_mesh`, by one thread.

    Programs that communicate must reach all devices in one order. `compiled`: whether it takes
    compiled programs on one device, too.
    """
    disabled = jax.config.jax_disable_jit
    if disabled and (compiled or mesh.size > 1):
        where = "a bitwise reproducible mode" if compiled else f"a mesh of {mesh.size} devices"
        raise ConfigError(
            f"jax_disable_jit with {where}, which takes compiled programs: use mode='jit' and "
            "mesh=rx.make_mesh(1), or jax.debug.print instead"
        )
    if jax.sharding.get_abstract_mesh().empty:  # almost always
        return in_flight.lock
    return _both(in_flight.lock, in_own_mesh(mesh, named=named))


@contextlib.contextmanager
def _without_mesh() -> Iterator[None]:
    check_outside_jit(jnp.zeros(()))
    with jax.set_mesh(_NO_MESH):
        yield


@contextlib.contextmanager
def _both(one: Context, other: Context) -> Iterator[None]:
    with one, other:
        yield


class _Configured(Protocol):
    configuration: Any


Self = TypeVar("Self", bound=_Configured)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def serialized(
    method: Callable[Concatenate[Self, _Given], _Result],
) -> Callable[Concatenate[Self, _Given], _Result]:
    """Return a method of an object with a configuration that runs undisturbed."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(self: Self, *given: _Given.args, **options: _Given.kwargs) -> _Result:
        try:
            with self.configuration.dispatch_context():
                return method(self, *given, **options)
        except TypeError:  # looked at only then, as a step is called often
            bind(method.__qualname__, signature, (self, *given), options)
            raise

    known = with_signature(run, signature)
    return cast(Callable[Concatenate[Self, _Given], _Result], known)
