"""The fingerprint of a program: what changes it, and what does not."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import cases
from support.resumable import loss, model, rows
from support.tiers import EXHAUSTIVE, exhaustive
from support.training import parallel, slices

import replicax as rx
from replicax.core.data.sources import as_source
from replicax.core.ground.job import Alone
from replicax.errors import ConfigError
from replicax.train.folder.program_fingerprint import program_fingerprint, some_rows
from replicax.train.guarded import guarded, with_losses
from replicax.train.run.summary import this_start

ROWS = rows(16)
ADAM = optax.adam(0.01)


def fingerprint(
    loss: Any = loss, optimizer: Any = ADAM, batch: Any = ROWS, made: Any = model, **settings: Any
) -> dict[str, str]:
    dp = parallel(loss, optimizer, **{"devices": 1, **settings})
    return program_fingerprint(dp, dp.init(made()), batch)


@pytest.fixture(scope="module")
def usual() -> dict[str, str]:
    return fingerprint()


def other(usual: dict[str, str], found: dict[str, str]) -> set[str]:
    assert usual.keys() == found.keys()
    return {part for part in usual if usual[part] != found[part]}


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (1, {"mode": "single"}),
        (8, {}),
        (2, {"mode": "shard_map"}),
        (8, {"mode": "pmap"}),
        (4, {"mode": "exact", "micro_shards": 8}),
        (8, {"layout": "zero1"}),
        (8, {"layout": "fsdp"}),
        (2, {"accumulate": 4}),
        (2, {"mode": "shard_map", "reduction": "bfloat16"}),
        (1, {"donate": False}),
    ],
    ids=str,
)
def test_it_is_the_same_however_the_program_is_run(
    usual: dict[str, str], devices: int, settings: dict[str, Any]
) -> None:
    assert fingerprint(devices=devices, **settings) == usual


def test_guards_padding_and_the_size_of_the_batch_are_no_part_of_it(usual: dict[str, str]) -> None:
    dp = rx.DataParallel(loss, ADAM)
    state = with_losses(dp.init(model()))
    (batch,) = dp.feed(rows(13), batch_size=13)
    assert batch.size == 16
    for given in (batch, rows(40), jax.eval_shape(lambda each: each, ROWS)):
        assert program_fingerprint(guarded(dp, state), state, given) == usual


SOURCE = """
import jax, jax.numpy as jnp
def loss(model, batch, key):
    hidden = jax.nn.relu(batch["x"] @ model["hidden"])
    return 0.5 * jnp.sum((hidden @ model["out"] - batch["y"]) ** 2, axis=-1)
"""


def written(*edits: tuple[str, str]) -> Callable[..., Any]:
    text = SOURCE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    found: dict[str, Any] = {}
    exec(text, found)
    return next(each for name, each in found.items() if name in ("loss", "renamed"))


@pytest.mark.parametrize(
    "edit",
    [
        ("    return", "    # a comment\n\n    return"),
        ("hidden =", "activation ="),
        ("def loss", "def renamed"),
        ("    return", "    jax.debug.print('{}', key)\n    return"),
        ("    return", "    unused = jnp.sin(batch['x'])\n    return"),
    ],
)
def test_what_computes_the_same_is_the_same(edit: tuple[str, str]) -> None:
    edits = [edit, ("hidden @", "activation @")] if "activation =" in edit[1] else [edit]
    assert fingerprint(written(*edits)) == fingerprint(written())


@pytest.mark.parametrize(
    "edit",
    [
        ("0.5 *", "500.0 *"),
        ("relu", "gelu"),
        ("** 2", "** 4"),
        ("0.5 *", "jnp.array([0.5] * batch['x'].shape[0]) *"),
        ("axis=-1)", "axis=-1), {'size': batch['y'][:, 0]}"),
        ('batch["x"]', "batch['x'] * jax.random.bernoulli(key, 0.9, batch['x'].shape)"),
    ],
)
def test_another_loss_is_another(edit: tuple[str, str]) -> None:
    assert other(fingerprint(written()), fingerprint(written(edit))) == {"loss"}


def test_constants_count_by_their_values() -> None:
    def weighing(weights: Any) -> dict[str, str]:
        return fingerprint(lambda model, batch, key: loss(model, batch, key)[0] * jnp.sum(weights))

    many = np.linspace(0, 1, 5000)
    assert weighing(many) == weighing(many.copy())
    assert other(weighing(many), weighing(np.append(many[:-1], 2))) == {"loss"}


def test_names_of_metrics_and_a_rule_for_the_derivative_are_part_of_it() -> None:
    def named(name: str, slope: float = 1.0) -> dict[str, str]:
        @jax.custom_vjp
        def passed(x: jax.Array) -> jax.Array:
            return x

        passed.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * slope,))

        def loss(model: Any, batch: Any, key: Any) -> Any:
            values = jnp.sum(passed(batch["x"] @ model["hidden"]) @ model["out"], axis=-1)
            return values, {name: values}

        return fingerprint(loss)

    assert named("a") == named("a")
    assert other(named("a"), named("b")) == {"loss"}
    assert other(named("a"), named("a", slope=2.0)) == {"loss"}


def test_a_schedule_is_another_by_its_length_and_by_its_decay() -> None:
    def decaying(steps: int, ema: float = 0.9) -> dict[str, str]:
        return fingerprint(optimizer=optax.sgd(optax.linear_schedule(0.1, 0.0, steps)), ema=ema)

    assert decaying(100) == decaying(100)
    assert other(decaying(100), decaying(200)) == {"optimizer"}
    assert other(decaying(100), decaying(100, ema=0.95)) == {"optimizer"}


def test_other_arrays_are_another_model(usual: dict[str, str]) -> None:
    def wider() -> Any:
        return {"hidden": jnp.zeros((8, 32)), "out": jnp.zeros((32, 8))}

    assert other(usual, fingerprint(made=wider)) == {"model", "loss", "optimizer"}
    assert other(usual, fingerprint(precision="bfloat16")) == {"loss"}
    assert other(usual, fingerprint(trainable="out")) == {"loss", "optimizer"}


def test_an_optimizer_that_asks_for_a_mesh_axis_has_none() -> None:
    averaging = optax.stateless(lambda updates, _: jax.lax.pmean(updates, "data"))
    found = fingerprint(optimizer=optax.chain(averaging, ADAM), mode="shard_map")
    assert set(found) == {"batch", "model", "loss"}


def stepping(rate: float, mode: str, devices: int) -> dict[str, str]:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state, batch, key)
        return jax.tree.map(lambda a, g: a - rate * g, state, gradient), means

    dp = parallel(step=step, mode=mode, devices=devices)
    state = dp.init(model())
    return program_fingerprint(guarded(dp, state), state, ROWS)


def of_length(length: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {"x": np.ones((16, length), dtype), "y": np.ones(16, np.float32)}


def of_any_length(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"].mean(1) * model["w"] - batch["y"]) ** 2


@pytest.mark.promise("outside.odd-sources-resume")
def test_a_loader_whose_batches_vary_in_shape_resumes(tmp_path: Path) -> None:
    dp = rx.DataParallel(of_any_length, ADAM, mode="single")
    source = [of_length(length) for length in (5, 7, 3, 6)]
    for steps in (1, 2, 4):
        state = dp.init({"w": jnp.ones(())})
        fit = rx.fit(dp, state, source, steps=steps, run_dir=tmp_path, progress=False)
        assert fit.step == steps


def test_a_loss_may_require_the_rows_of_a_batch() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.sum(batch["x"].reshape(16, -1) * model["w"], axis=1)

    dp = rx.DataParallel(loss, ADAM, mode="single")
    one = {name: each[:1] for name, each in of_length(4).items()}
    found = program_fingerprint(dp, dp.init({"w": jnp.ones(())}), one, 16)
    assert found["batch"].startswith("float32[16, 4]")


def test_a_custom_step() -> None:
    usual = stepping(0.1, "jit", 1)
    assert set(usual) == {"batch", "model", "step"}
    assert stepping(0.1, "shard_map", 4) == usual
    assert other(usual, stepping(0.2, "jit", 1)) == {"step"}


KINDS = ("nnx", "equinox", "gpt2")


def of_kinds() -> str:
    return str(
        {
            name: fingerprint(case.loss, batch=case.source, made=case.model)
            for name, case in ((name, (cases.CASES | cases.DROPOUT_CASES)[name]) for name in KINDS)
        }
    )


@EXHAUSTIVE
def test_it_is_the_same_in_another_process() -> None:
    tests = Path(__file__).resolve().parents[1]
    script = "from train import test_program_fingerprint as here; print(here.of_kinds())"
    path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == of_kinds()


def test_rows_are_looked_at_without_reading_what_is_read_once() -> None:
    read: list[int] = []

    def row(at: Any) -> Any:
        read.append(at)
        return {"x": np.full(3, at, np.float64)}

    def looked(data: Any) -> Any:
        return some_rows(as_source(data, 4, Alone(), shuffle=False, seed=0))

    (x,) = looked({"x": np.zeros((10, 3))}).values()
    assert (x.shape[1:], x.dtype) == ((3,), np.float32)
    (x,) = looked(rx.ProcessLocal(grain.MapDataset.source(range(1000)).map(row))).values()
    assert (x.shape[1:], x.dtype) == ((3,), np.float32)
    assert len(set(read)) <= 2
    batches = iter([{"x": np.zeros((4, 3))}])
    assert looked(batches) is None
    assert len(list(batches)) == 1


# Runs.


def trained(
    folder: Path, factor: float = 1.0, optimizer: Any = ADAM, source: Any = ROWS, **settings: Any
) -> rx.types.Fit:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return factor * jnp.sum((batch["x"] @ model["hidden"] @ model["out"]) ** 2, axis=-1)

    dp = parallel(loss, optimizer, devices=1)
    length = {"steps": 2} if "epochs" not in settings else {}
    return rx.fit(
        *(dp, dp.init(model()), source),
        batch_size=8,
        run_dir=folder,
        progress=False,
        **{**length, **settings},
    )


@pytest.mark.promise("checkpoints.another-program")
@pytest.mark.parametrize(
    ("source", "more"),
    [(ROWS, 2), *map(exhaustive, [(ROWS, 0), (slices(ROWS, 8), 0), (slices(ROWS, 8), 2)])],
    ids=["arrays", "arrays, no more", "a loader, no more", "a loader"],
)
def test_a_run_is_not_resumed_by_another_program(tmp_path: Path, source: Any, more: int) -> None:
    trained(tmp_path, source=source, epochs=1)
    before = (tmp_path / "config.json").read_text()
    length = {"epochs": 1 + more}
    with pytest.raises(ConfigError, match=r"program\.loss \w{12} -> \w{12} \(the loss, "):
        trained(tmp_path, 1000.0, source=source, **length)
    with pytest.raises(ConfigError, match=r"program\.optimizer \w{12} -> \w{12} \("):
        trained(tmp_path, optimizer=optax.adam(0.02), source=source, **length)
    assert '"program"' in before
    found = trained(tmp_path, 1000.0, source=source, accept_changes=True, **length)
    assert found.step == 2 + more * 2
    assert trained(tmp_path, 1000.0, source=source, **length).steps == 0


def test_more_epochs_need_no_flag_where_no_schedule_follows(tmp_path: Path) -> None:
    trained(tmp_path, epochs=1, config={"fields": {"epochs": 1}})
    found = trained(tmp_path, epochs=3, config={"fields": {"epochs": 3}})
    assert (found.steps, found.step) == (4, 6)
    scheduled = optax.adam(optax.linear_schedule(0.01, 0.0, 8))
    with pytest.raises(ConfigError, match=r"fields\.epochs 3 -> 4, program\.optimizer "):
        trained(tmp_path, optimizer=scheduled, epochs=4, config={"fields": {"epochs": 4}})


def test_a_start_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    monkeypatch.delenv("GIT_DIR")
    assert "commit" not in this_start()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    clean = this_start()
    assert len(clean["commit"]) == 40
    (tmp_path / "file").write_text("2")
    assert this_start()["commit"] == f"{clean['commit']}-dirty"
    monkeypatch.setenv("PATH", "")
    found = this_start()
    assert set(found) == {"command", "host", "time"}
    assert found["command"] == ["train.py", "--fast"]
