"""Compare the first losses of `examples/` with those of plain JAX on one device.

Prints the largest relative difference over modes, devices and sources, which is the last column of
`docs/examples.md`, and the page's other figures. The torch example needs `make peers`.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("NPROC", "8")  # of mode `exact`; before JAX starts

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import examples


def largest_difference(name: str) -> float:
    example = examples.load(name)
    expected = examples.by_hand(name, example)
    found = [
        examples.with_replicax(name, example, source, mode, devices)[0]
        for mode, devices in examples.cases(name)
        for source in examples.sources(example).values()
    ]
    if name in examples.FURTHER:
        with tempfile.TemporaryDirectory() as folder:
            found += examples.further(name, example, Path(folder))
    return max(examples.largest_difference(name, losses, expected) for losses in found)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    for name in sys.argv[1:] or examples.NAMES:
        plain, here = examples.plain_lines(name), examples.lines_here(name)
        changed, difference = examples.changed_lines(name), largest_difference(name)
        print(
            f"{name}: {plain} lines, {here} here, {changed} changed, {difference:.0e}", flush=True
        )


if __name__ == "__main__":
    main()
