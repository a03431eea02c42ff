"""Time of `import replicax` over `import jax, optax`, interleaved, in separate processes.

Goal: at most 0.1 s more. Writes `results/import.json`.
"""

import argparse
import statistics
import subprocess
import sys

from timing import environment, save

PROGRAMS = {"jax, optax": "import jax, optax", "replicax": "import jax, optax, replicax"}
LOADED = """
import sys, pathlib, jax, optax, replicax
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
