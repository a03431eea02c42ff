"""Kernels of mode `exact` on NVIDIA GPUs: chosen by measurement once, and the same ever after.

XLA chooses each matrix product's kernel by the clock, so two processes may choose differently, and
kernels add in different orders. Mode `exact` therefore takes the first kernel of each list, which
is slow. A recorded file of choices has the speed of tuning and the same bits: XLA's determinism.md,
"persisted autotuning". The micro-shards of any number of devices have the same products, so one
file serves them all.
"""

import contextlib
import dataclasses
import hashlib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from replicax.core.modes.mapping import Mode
from replicax.core.placement.mesh import AnyMesh, platform_of
from replicax.errors import ConfigError

MEASURING: dict[str, Any] = {
    "xla_gpu_deterministic_ops": False,  # it takes the first kernels
    # All products are cuBLAS's, which is what tuning chooses. No other kernels are tuned.
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    # As in programs with the choices, which exclude all that is not deterministic. To exclude it
    # here would take the first kernels too.
    "xla_gpu_enable_scatter_determinism_expander": True,
}
"""Compiler options with which XLA measures the kernels of matrix products."""
COMPLETE = {"xla_gpu_require_complete_aot_autotune_results": True}
"""The compiler option that fails where a kernel is not recorded."""
_RECORDED: dict[str, Any] = {**MEASURING, "xla_gpu_exclude_nondeterministic_ops": True}
_read_here: set[Path] = set()
"""The file that this process uses: XLA reads one, and ignores all others."""
_ENDING = ".textproto"  # by which XLA recognises text


class CompiledProgram(Protocol):
    """One of the programs of a step."""

    def as_text(self) -> str:
        """Return the optimized program."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A recorded file of kernels."""

    path: Path
    """Named by the digest of its content: keys of compiled programs contain the name."""

    @property
    def digest(self) -> str:
        """The start of the SHA-256 of the file, which is its name."""
        return self.path.stem

    @property
    def usual(self) -> dict[str, Any]:
        """Compiler options with the recorded kernels, and the first of the others."""
        return {**_RECORDED, "xla_gpu_load_autotune_results_from": str(self.path)}

    @property
    def complete(self) -> dict[str, Any]:
        """Compiler options that fail if a kernel is not recorded."""
        return {**self.usual, **COMPLETE}


def as_tuning(given: str | Path, mode: Mode, mesh: AnyMesh) -> Tuning:
    """Return the tuning of an argument.

    Raises:
        ConfigError: it is no recorded file, or for another mode or platform.
    """
    path, what = Path(given).absolute(), f"tuning={str(given)!r}"
    _check_place(what, mode, mesh)
    if not path.is_file():
        raise ConfigError(
            f"{what} is not a file: write one on one GPU, path = dp.record_tuning(state, batch, "
            "folder)"
        )
    if path.name != (name := _name_of(path.read_bytes())):
        raise ConfigError(
            f"{what} has the content of {name}; the name is a digest of the kernels, by which "
            "compiled programs are kept: give it that name, or record it again"
        )
    if others := _read_here - {path}:
        raise ConfigError(
            f"{what} after {others.pop().name}; XLA reads one file of kernels in a process: use "
            "the same file, or another process"
        )
    _read_here.add(path)
    return Tuning(path)


def check_records(mode: Mode, mesh: AnyMesh) -> None:
    """Raise `ConfigError` if kernels cannot be recorded here."""
    _check_place("record_tuning", mode, mesh)
    if mesh.size > 1 or jax.process_count() > 1:
        raise ConfigError(
            f"record_tuning on {mesh.size} devices of {jax.process_count()} processes, each of "
            "which would choose: record on one GPU, mesh=rx.make_mesh(devices=jax.devices()[:1])"
        )


def recorded_kernels(
    compiled: Callable[[Mapping[str, Any]], Sequence[CompiledProgram]], folder: Path
) -> Path:
    """Write the kernels of a step into `folder`, and return the file.

    `compiled` returns the step's programs, compiled with these options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The path is in the keys of kept programs: a new one, so that none of them is taken instead.
    written = folder / f"{uuid.uuid4().hex}{_ENDING}"
    measuring = {**MEASURING, "xla_gpu_dump_autotune_results_to": str(written)}
    try:
        texts = [each.as_text() for each in compiled(measuring)]
        if any("__cudnn$conv" in text for text in texts):
            raise ConfigError(
                "record_tuning of a step with convolutions, whose fastest kernels may not be "
                "deterministic: leave tuning= out"
            )
        if not written.exists():
            raise ConfigError(
                f"record_tuning with {len(texts)} programs, in which XLA had no kernel to choose: "
                "leave tuning= out"
            )
        for each in compiled({**_RECORDED, **COMPLETE}):  # XLA still has the choices in memory
            each.as_text()
        return written.rename(folder / _name_of(written.read_bytes()))
    finally:
        written.unlink(missing_ok=True)


@contextlib.contextmanager
def unrecorded_refused(program: str) -> Iterator[None]:
    """Raise `ConfigError` for XLA's error that kernels of `program` are not recorded."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"Failed to get configs for: (\d+) out of (\d+)", str(error))
        if "Duplicate autotuning result" in str(error):
            raise ConfigError(
                f"tuning= in a process that has chosen kernels of {program} itself; XLA takes no "
                "others then: use the file in a new process, before other steps"
            ) from error
        if found is None:
            raise
        raise ConfigError(
            f"tuning= with {found[1]} of {found[2]} kernels of {program} missing; they depend on "
            "the model, rows of a micro-shard, precision, GPU and jax: record it again"
        ) from error


def _check_place(what: str, mode: Mode, mesh: AnyMesh) -> None:
    if not mode.bitwise:
        raise ConfigError(
            f"{what} in mode={mode.name!r}, in which XLA chooses kernels; recorded ones are for "
            "mode='exact': use it, or leave this out"
        )
    platform = platform_of(mesh)
    if platform != "gpu":
        raise ConfigError(
            f"{what} on {platform or 'described'} devices; only kernels of NVIDIA GPUs are chosen "
            "by measurement: leave it out"
        )


def _name_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16] + _ENDING
