"""Freed memory is kept where glibc allows it, and nothing changes elsewhere."""

import subprocess
import sys

import pytest
from support.tiers import EXHAUSTIVE

from replicax.train.run import host_memory

PROGRAM = """
import resource
import numpy as np
from replicax.train.run.host_memory import keep_freed_memory
if {kept}:
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(12_000_000, np.float32)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@EXHAUSTIVE
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_freed_memory_is_not_paged_in_again() -> None:
    found = {}
    for kept in (False, True):
        program = PROGRAM.format(kept=kept)
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        found[kept] = int(run.stdout)
    assert found[True] * 20 < found[False]


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_memory.keep_freed_memory() is False
