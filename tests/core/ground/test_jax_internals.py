"""Assumptions about private names of JAX; a new JAX that breaks one fails here first."""

import ast
import inspect
from typing import Any

import jax
import pytest
from test_architecture import FILES, parsed

from replicax.core.ground import jax_internals

TAKEN = {
    "compile_or_get_cached": "backend computation devices compile_options host_callbacks"
    " executable_devices",
    "get_compile_options": "num_replicas num_partitions device_assignment env_options_overrides"
    " backend",
    "UnloadedMeshExecutable": "xla_executable device_list backend input_avals input_shardings"
    " output_avals output_shardings committed name unordered_effects ordered_effects keepalive"
    " host_callbacks kept_var_idx mut xla_in_layouts dispatch_in_layouts xla_out_layouts"
    " all_args_info pgle_profiler",
    "Compiled": "executable const_args args_info out_tree",
    "tpu_chips": "",
}
"""Names of the parameters that Replicax passes."""
OF_A_LOWERING = "backend host_callbacks unordered_effects ordered_effects keepalive kept_var_idx"


@pytest.mark.parametrize("name", TAKEN)
def test_parameters(name: str) -> None:
    known = inspect.signature(getattr(jax_internals, name)).parameters
    passed = TAKEN[name].split()
    assert not set(passed) - set(known), "no longer known"
    needed = {key for key, each in known.items() if each.default is inspect.Parameter.empty}
    assert not needed - set(passed), "newly needed"


def test_what_a_lowering_holds() -> None:
    lowering: Any = jax.jit(lambda x: x + 1).lower(1.0)._lowering
    assert not set(OF_A_LOWERING.split()) - set(lowering.compile_args)
    assert lowering.const_args is not None
    assert "stablehlo.add" in str(lowering.stablehlo())


def test_every_process_writes_its_own_programs_to_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, cache = jax_internals.compiler, jax_internals.compilation_cache
    passed = "cache_key compile_time_secs module_name backend executable"
    found = list(inspect.signature(compiler._cache_write).parameters)
    assert found in (passed.split(), [*passed.split(), "host_callbacks"])
    put = "cache_key module_name executable backend compile_time"
    assert list(inspect.signature(cache.put_executable_and_time).parameters) == put.split()
    backend, written = jax.devices()[0].client, list[Any]()
    monkeypatch.setattr(compiler, "_cache_write", lambda *given: written.append("by JAX"))
    monkeypatch.setattr(cache, "put_executable_and_time", lambda *given: written.append(given))
    jax_internals.cache_own_programs()
    compiler._cache_write("key", 1.5, "name", backend, "program")
    compiler._cache_write("key", 1.5, "name", backend, "program", ["a host callback"])
    assert written == [("key", "name", "program", backend, 1), "by JAX"]


def test_there_is_one_door() -> None:
    def private(node: ast.AST) -> bool:
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [
            each.name for each in getattr(node, "names", ()) if isinstance(node, ast.Import)
        ]
        return any(name.startswith("jax._src") for name in modules)

    trees = {module: ast.walk(parsed(path)) for module, path in FILES.items()}
    users = [module for module, nodes in trees.items() if any(map(private, nodes))]
    assert users == ["replicax.core.ground.jax_internals"]
