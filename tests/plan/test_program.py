"""A step as a program: its export, its device count, and steps that cannot be exported."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from support.small_steps import SMALL_STEPS, SmallStep, lenet, mlp, wide
from support.tiers import only

import replicax as rx
from replicax.errors import ConfigError
from replicax.plan.exported import ExportedStep, export_step

# Three kernels and biases, one of them a stack, twice more for Adam; its count, the step, a seed.
MLP_LEAVES = 3 * (3 * 2) + 3


def program(step: SmallStep, devices: int = 2, platform: str = "cpu") -> ExportedStep:
    return export_step(step.on(devices).dp, step.model, step.batch, platform, None)


def exported(step: SmallStep, devices: int, platform: str) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(program(step, devices, platform).module))


def test_its_means_are_counted() -> None:
    made = program(wide(24), 4)
    assert (dict(made.sizes)["data"], made.metrics) == (4, 1)
    assert program(lenet(8)).metrics == 2  # loss, accuracy


@pytest.mark.parametrize("donate", [True, False])
def test_the_state_comes_first_and_gives_its_memory(donate: bool) -> None:
    step = mlp(8, donate=donate)
    made = program(step)
    state = jax.tree.leaves(step.dp.abstract_state(step.model))
    assert len(state) == MLP_LEAVES
    assert made.donated == (MLP_LEAVES if donate else 0)
    shapes = jax.export.deserialize(bytearray(made.module)).in_avals
    assert [(each.shape, each.dtype) for each in shapes[:MLP_LEAVES]] == [
        (each.shape, each.dtype) for each in state
    ]


@pytest.mark.parametrize("mode", ["jit", "shard_map", "pmap"])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize("devices", [2, 64])
def test_a_step_that_calls_back_to_the_host_is_refused(
    mode: str, platform: str, devices: int
) -> None:
    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        jax.debug.print("{}", model.sum())
        return jnp.dot(batch["x"], model)

    step = SmallStep(
        rx.DataParallel(loss, optax.sgd(0.1), mode=mode), jnp.ones(3), {"x": jnp.ones((64, 3))}
    )
    with pytest.raises(ConfigError, match=r"calls back\b.*host .*callback"):
        program(step, devices, platform)


def test_other_errors_of_a_loss_are_its_own() -> None:
    reason = "of the loss"

    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        raise ValueError(reason)

    step = SmallStep(rx.DataParallel(loss, optax.sgd(0.1)), jnp.ones(3), {"x": jnp.ones((8, 3))})
    with pytest.raises(ValueError, match=rf"^{reason}\n"):
        program(step)


@pytest.mark.parametrize("name", only([next(iter(SMALL_STEPS))], SMALL_STEPS))
def test_it_is_read_without_the_classes_it_was_made_of(name: str, tmp_path: Path) -> None:
    made = program(SMALL_STEPS[name](8))
    (tmp_path / "module").write_bytes(made.module)
    reader = (
        "import sys, jax\n"
        "read = jax.export.deserialize(bytearray(open('module', 'rb').read()))\n"
        "assert not {'replicax', 'optax', 'flax'} & set(sys.modules)\n"
        "print(read.nr_devices, len(read.in_avals))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", reader], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    devices, arguments = ended.stdout.split()
    assert int(devices) == 2
    assert int(arguments) > made.donated > 0


SETTINGS = [{"mode": "shard_map"}, {"mode": "jit"}, {"layout": "fsdp"}]
OTHER_DEVICES = list(itertools.product(SETTINGS, [256, 1024], ["tpu", "cuda"]))


@pytest.mark.parametrize(
    ("settings", "devices", "platform"),
    # Each of the settings with both counts and both platforms.
    only([OTHER_DEVICES[number] for number in (0, 3, 5, 6, 8, 11)], OTHER_DEVICES),
)
def test_devices_that_do_not_exist(settings: dict[str, Any], devices: int, platform: str) -> None:
    assert len(jax.devices()) < devices
    read = exported(mlp(2 * devices, **settings), devices, platform)
    assert read.nr_devices == devices
    assert read.platforms == (platform,)
