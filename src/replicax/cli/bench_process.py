"""One process of a job that `replicax bench RECIPE --processes` has launched.

`python -m replicax.cli.bench_process RECIPE FLAGS PATH`: the flags of the bench, and where
process 0 writes what the job has measured.
"""

import sys
from pathlib import Path

import jax

import replicax as rx
from replicax.bench.cases import weak_rows
from replicax.bench.processes import RUNS, write_part
from replicax.cli.arguments import parse_arguments
from replicax.cli.bench import BenchOptions, bench_recipe, counts_of
from replicax.train.host_memory import keep_freed_memory


def main(arguments: list[str]) -> None:
    """Measure on the devices of all processes."""
    *own, path = arguments
    parsed = parse_arguments("bench", BenchOptions, own)
    assert parsed is not None, "the launcher has no use for help"
    counts = counts_of("--processes", parsed.options.processes)
    assert counts
    job = rx.initialize(verbose=False)
    keep_freed_memory()
    result = bench_recipe(
        parsed,
        batch_size=weak_rows(parsed.recipe.batch_size, counts) * jax.device_count(),
        devices=[jax.device_count()],
        rounds=RUNS,
        job=job,
        progress=False,
    )
    if job.process == 0:
        write_part(result, Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
