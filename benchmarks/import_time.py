"""Time of `import replicax` over `import jax, optax`, interleaved, in separate processes.

Names are imported on first use, so that of `DataParallel` counts; goal: at most 0.08 s more. Then
what a first step imports besides, and commands. Writes `results/import.json`.
"""

import argparse
import statistics
import subprocess
import sys

from timing import environment, save

_CORE = "import jax, optax, replicax; replicax.DataParallel"
PROGRAMS = {
    "jax, optax": "import jax, optax",
    "replicax": _CORE,
    "first step": f"{_CORE}; import replicax.core.call_checks",
    "replicax --help": "import replicax.cli",
    "replicax train": "import replicax.cli.train",
    "replicax verify": "import replicax.cli.verify",
}
LOADED = """
import sys, pathlib, jax, optax, replicax
replicax.DataParallel
names = [name for name in sys.modules if name.partition('.')[0] == 'replicax']
files = [sys.modules[name].__file__ for name in names]
print(len(names), sum(len(pathlib.Path(file).read_text().splitlines()) for file in files))
"""
CLOCK = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):  # the first fills the caches
        for name, program in PROGRAMS.items():
            took = float(run(CLOCK.format(program)))
            if number:
                seconds[name].append(took)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    modules, lines = map(int, run(LOADED).split())
    extra = medians["replicax"] - medians["jax, optax"]
    print(f"{medians}: {extra:.3f} s more; {modules} modules of Replicax, {lines} lines")
    result = {"seconds": seconds, "extra_seconds": extra, "modules": modules, "lines": lines}
    save("import", {**environment(), **result})


if __name__ == "__main__":
    main()
