"""A logger whose server is gone: the run is unchanged, and one warning appears."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import EXHAUSTIVE

import replicax as rx

ROWS = np.random.default_rng(0).normal(size=64).astype(np.float32)
STEPS = 40


class Gone(rx.hooks.Logger):
    """A logger without a server."""

    def __init__(self, at: str) -> None:
        self._at = at

    def open(self, start: Any) -> None:
        self._call("open")

    def write(self, record: Any) -> None:
        self._call("write")

    def _call(self, point: str) -> None:
        if point == self._at:
            socket.create_connection(("127.0.0.1", 9), timeout=5)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (model["w"] * batch["x"] - 2 * batch["x"]) ** 2


def weights(*hooks: rx.Hook) -> bytes:
    """Return the bits after all steps; prints its messages."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])  # another process has only one
    dp = rx.DataParallel(loss, optax.sgd(0.01), mesh=mesh)
    state = dp.init({"w": jnp.float32(0)})
    result = rx.fit(
        dp, state, {"x": ROWS}, batch_size=16, steps=STEPS, log_every=2, hooks=list(hooks)
    )
    assert (result.step, result.failed_hooks, result.exit_code) == (STEPS, (), 0)
    return np.asarray(result.state.params["w"]).tobytes()


@pytest.mark.parametrize("at", ["open", "write"])
def test_it_costs_no_step_no_bit_and_one_line(at: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = weights()
    assert "ALARM" not in capsys.readouterr().err
    assert weights(Gone(at)) == expected
    printed = capsys.readouterr()
    said = [*printed.out.splitlines(), *printed.err.splitlines()]
    (alarm,) = (line for line in said if line.startswith("ALARM"))
    assert "ConnectionRefusedError" in alarm
    (lost,) = (line for line in said if line.startswith("Gone:"))
    assert f"{STEPS // 2 + 1} of {STEPS // 2 + 1} " in lost


@contextlib.contextmanager
def server(*, listens: bool) -> Iterator[str]:
    """Yield the address of a server that refuses, or accepts and never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@EXHAUSTIVE
@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "is silent"])
@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_so_it_is_with_real_clients(package: str, listens: bool, tmp_path: Path) -> None:
    """Run in another process: these clients leave threads and processes behind."""
    pytest.importorskip(package, reason="no client, which is in the lock")
    expected = weights().hex()
    tests = Path(__file__).parents[2]
    with server(listens=listens) as address:
        wandb = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "WANDB_SILENT": "true"}
        done = subprocess.run(
            [sys.executable, __file__, package, address],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tests), **wandb},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    assert said.count(f"weights {expected}") == 1
    assert sum(line.startswith("ALARM") for line in said) == 1
    (seconds,) = (float(line.split()[1]) for line in said if line.startswith("seconds"))
    assert seconds < 120  # it waits 10 at the end; left to themselves the clients try for minutes


if __name__ == "__main__":
    _, package, address = sys.argv
    begun = time.perf_counter()
    bits = weights(rx.hooks.MLflow(address) if package == "mlflow" else rx.hooks.WandB("gone"))
    print(f"weights {bits.hex()}\nseconds {time.perf_counter() - begun}")
