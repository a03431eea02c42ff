"""Counting what JAX compiles while some code runs."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax

# Lowering and not compiling: a program found in the persistent cache was still built anew.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@dataclasses.dataclass
class Compilations:
    """Names of the functions compiled so far, each as often as it was."""

    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        """Programs compiled."""
        return len(self.names)


@contextmanager
def counted_compilations() -> Iterator[Compilations]:
    """Count what is compiled in this process while the context is open."""
    seen = Compilations()

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        del duration_secs
        if event == _LOWERED:
            seen.names.append(str(facts.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
