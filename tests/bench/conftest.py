"""Programs are compiled whenever a bench asks for it."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _compiled_anew() -> Iterator[None]:
    programs = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", programs)
