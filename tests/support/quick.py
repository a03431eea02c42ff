"""Programs that compile in less time, where runs are tested and not the numbers of a step."""

from collections.abc import Iterator

import jax
import pytest

VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"


def _optimize(patch: pytest.MonkeyPatch, wanted: bool) -> None:
    jax.clear_caches()  # what is compiled the one way has other bits than the other
    jax.config.update(VARIABLE.lower(), not wanted)
    patch.setenv(VARIABLE, str(int(not wanted)))  # for child processes


@pytest.fixture(scope="module", autouse=True)
def quick_programs() -> Iterator[None]:
    """LLVM does not optimize; import this where that is so."""
    with pytest.MonkeyPatch.context() as patch:
        _optimize(patch, False)
        yield
        _optimize(patch, True)


@pytest.fixture
def optimized(quick_programs: None) -> Iterator[None]:
    """LLVM optimizes after all: for the same bits from programs that differ."""
    with pytest.MonkeyPatch.context() as patch:
        _optimize(patch, True)
        yield
        _optimize(patch, False)
