"""`replicax lint --step-file`: the file that `verify --step` needs, from a training script."""

from pathlib import Path

import pytest

from replicax.errors import ConfigError
from replicax.lint.step_file import step_file
from replicax.verify.step_files import verify_files

SCRIPT = """
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

AXIS = "batch"
tx = optax.sgd(0.1)
params = {"w": np.ones(3, np.float32)}
opt_state = tx.init(params)
x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
y = np.arange(32, dtype="float32")


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def reduced(grads):
    return jax.lax.pmean(grads, AXIS)


@partial(jax.pmap, axis_name=AXIS)
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(reduced(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, AXIS)


if __name__ == "__main__":
    raise SystemExit("trained at import")
"""
CALLED = """
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
state = np.ones(3, np.float32)
batch = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")


def sgd(state, batch):
    grads = jax.grad(lambda w: ((batch @ w) ** 2).mean())(state)
    return state - 0.1 * jax.lax.pmean(grads, "data")


def main():
    step = jax.jit(
        jax.shard_map(sgd, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    )
"""


def written(folder: Path, text: str) -> Path:
    to = folder / "check.py"
    to.write_text(step_file(text, Path("train.py"), to))
    return to


@pytest.mark.parametrize("text", [SCRIPT, CALLED], ids=["pmap", "shard_map"])
def test_a_correct_step_passes_as_written(tmp_path: Path, text: str) -> None:
    to = written(tmp_path, text)
    found = verify_files(f"{to}:step", f"{to}:reference")
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("text", "reduction"),
    [(SCRIPT, "jax.lax.pmean(grads, AXIS)"), (CALLED, 'jax.lax.pmean(grads, "data")')],
    ids=["pmap", "shard_map"],
)
def test_a_sum_in_place_of_a_mean_is_found(tmp_path: Path, text: str, reduction: str) -> None:
    to = written(tmp_path, text.replace(reduction, reduction.replace("pmean", "psum")))
    assert not verify_files(f"{to}:step", f"{to}:reference").ok


def test_what_the_script_does_not_tell_is_left_to_fill_in(tmp_path: Path) -> None:
    text = SCRIPT.replace("\ny = ", "\nlabels = ").replace("tx = optax.sgd(0.1)\n", "")
    to = written(tmp_path, text.replace("opt_state = tx.init(params)\n", ""))
    with pytest.raises(NotImplementedError, match=r"fill in .*tx.*state.*batch"):
        verify_files(f"{to}:step", f"{to}:reference")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import jax\nstep = jax.jit(lambda w, x: w - jax.grad(f)(w, x))\n",
            "no pmap or shard_map",
        ),
        ("import jax\nstep = jax.pmap(lambda w, g: jax.grad(f)(w, g))\n", "which is the batch"),
        ("def f(:\n", r"train\.py is not Python: line 1"),
    ],
)
def test_what_cannot_be_told_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step_file(text, Path("train.py"), Path("check.py"))
