"""Mode `exact`: the same bits on any number of devices; `test_parity` has the numbers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.agreement import How, Trained, data_parallel, has_the_bits_of_one_device, on
from support.cases import BATCH, CASES, DROPOUT_CASES, Case, first_key
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.core.modes.exact.ordered_reduction import add_in_order
from replicax.core.step.reduction import REDUCTIONS
from replicax.train.files.fingerprint import sha256

ALL = {**CASES, **{f"{name}, dropout": case for name, case in DROPOUT_CASES.items()}}
QUICK = ("weighted", "nnx, dropout")


def how(devices: int, **more: Any) -> How:
    return on("exact", data=devices, **{"optimizer": "clipped", **more})


@pytest.mark.promise("exact.any-devices")
@pytest.mark.parametrize("devices", only([8], [2, 4, 8]))
@pytest.mark.parametrize("name", only(QUICK, ALL))
def test_the_same_bits_on_any_number_of_devices(name: str, devices: int) -> None:
    has_the_bits_of_one_device(ALL[name], how(devices))


@pytest.mark.promise("exact.any-accumulation")
@pytest.mark.parametrize(("devices", "accumulate"), only([(2, 4)], [(1, 8), (2, 4), (4, 2)]))
def test_the_same_bits_with_any_split_into_micro_batches(devices: int, accumulate: int) -> None:
    has_the_bits_of_one_device(CASES["weighted"], how(devices, accumulate=accumulate))


@pytest.mark.promise("exact.goes-on-elsewhere")
def test_a_state_that_moves_to_other_devices_keeps_its_bits() -> None:
    case = ALL["weighted"]
    steps = {devices: data_parallel(case, how(devices)) for devices in (1, 2)}

    def after(devices_of_epochs: tuple[int, ...]) -> str:
        state = steps[devices_of_epochs[0]].init(case.model())
        for epoch, devices in enumerate(devices_of_epochs):
            (batch,) = steps[devices].feed(case.source, BATCH, shuffle=True, epoch=epoch)
            state, _ = steps[devices].step(state, batch)
        return sha256(state)

    assert after((2, 2, 1, 2)) == after((1, 1, 1, 1))


@pytest.mark.promise("exact.low-precision")
@EXHAUSTIVE
@pytest.mark.parametrize("name", ["weighted", "gpt2"])
def test_the_same_bits_in_bfloat16(name: str) -> None:
    narrow = how(8, precision="bfloat16")
    two = dataclasses.replace(narrow, axes=(("data", 2),))
    has_the_bits_of_one_device(CASES[name], narrow, wanted=two)


def test_shard_map_has_other_bits_on_other_devices() -> None:
    """Otherwise the tests above would show nothing."""
    one, eight = (Trained(CASES["weighted"], on("shard_map", data=n)) for n in (1, 8))
    assert one.bits["state"] != eight.bits["state"]


@pytest.mark.promise("exact.batch-norm")
def test_batch_norm_keeps_the_mean_of_its_micro_shards_statistics() -> None:
    case = CASES["linen"]
    rows = {"x": case.source["x"][:32], "label": case.source["label"][:32]}
    dp = data_parallel(case, how(2))
    state = dp.init(case.model())
    kernel = np.asarray(state.params["Dense_0"]["kernel"])
    state, _ = dp.step(state, next(iter(dp.feed(rows, 32))))
    norm = state.extras["batch_stats"]["BatchNorm_0"]
    hidden = (rows["x"] @ kernel).reshape(8, 4, -1)
    np.testing.assert_allclose(norm["mean"], 0.01 * hidden.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.99 + 0.01 * hidden.var(1).mean(0), atol=1e-6)


@pytest.mark.promise("exact.bytes-of-a-ring")
def test_moves_no_more_than_a_ring() -> None:
    case = CASES["pytree"]
    compiled = inspect(data_parallel(case, how(8)).lower(case.model(), case.source).compile())
    assert {each.kind: each.count for each in compiled.collectives} == {
        "all-gather": 1,
        "all-to-all": 1,
    }
    numbers = 6 * 16 + 16 + 16 * 3 + 3 + 2 * 2  # the gradient, and totals and weights
    moved = sum(each.bytes for each in compiled.collectives) * 7 / 8
    assert moved <= 2 * 7 / 8 * 4 * (numbers + 7)


def test_the_tree_is_that_of_one_device() -> None:
    """Numbers whose sum depends on the order of additions."""
    values = jax.random.normal(first_key(), (8, 5)) * 10.0 ** jnp.arange(8)[:, None]
    mesh = rx.make_mesh()
    added = jax.shard_map(
        lambda own: add_in_order(REDUCTIONS["float32"], own[0], "data"),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("data"),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    pairs = values[0::2] + values[1::2]
    fours = pairs[0::2] + pairs[1::2]
    expected = np.asarray(fours[0] + fours[1])
    assert np.asarray(jax.jit(added)(values)).tobytes() == expected.tobytes()


def test_zeros_keep_their_sign() -> None:
    """A gradient of -0 from every micro-shard stays -0: 0 would give the weight another zero."""
    weights = []
    for devices in (1, 8):
        dp = rx.DataParallel(
            lambda model, batch, key: batch["x"] * model["w"],
            optax.sgd(1.0),
            mesh=rx.make_mesh(devices=jax.devices()[:devices]),
            mode="exact",
        )
        state = dp.init({"w": jnp.float32(-0.0)})
        state, _ = dp.step(state, {"x": np.full(8, -0.0, np.float32)})
        weights.append(np.signbit(state.params["w"]))
    assert weights == [False, False]


@pytest.mark.promise("exact.refuses-what-it-cannot-hold")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_shards": 12}, ["micro_shards=12", "power of two", "16"]),
        ({"micro_shards": 0}, ["micro_shards=0", "power of two"]),
        ({"devices": 3}, ["3 replicas", "micro_shards=8", "use 2 devices"]),
        ({"micro_shards": 4}, ["8 replicas", "micro_shards=4", "raise micro_shards to 8"]),
        (
            {"micro_shards": 4, "devices": 4},
            ["8 XLA threads", "8 CPU devices", "micro_shards to 8"],
        ),
        ({"micro_shards": 16}, ["8 XLA threads", "micro_shards=16", "NPROC=16"]),
        ({"accumulate": 4}, ["accumulate=4", "8 replicas", "micro_shards to 32"]),
        ({"layout": "fsdp"}, ["'exact'", "fsdp", "'jit'"]),
    ],
)
def test_refuses_what_cannot_be_shared_out(options: dict[str, Any], words: list[str]) -> None:
    options = {**options}
    layout, devices = options.pop("layout", "replicated"), options.pop("devices", 8)
    with pytest.raises(rx.errors.ConfigError) as refused:
        data_parallel(CASES["pytree"], on("exact", layout, data=devices, **options))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.promise("exact.refuses-what-it-cannot-hold")
def test_refuses_state_that_each_micro_shard_would_write() -> None:
    from flax import nnx

    class Counting(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
            self.seen = nnx.Variable(jnp.zeros(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.seen.set_value(self.seen.get_value() + x.sum())
            return self.linear(x)

    case = Case(Counting, CASES["nnx"].loss, CASES["nnx"].source)
    dp = data_parallel(case, how(2))
    state = dp.init(case.model())
    with pytest.raises(rx.errors.ConfigError, match="seen"):
        dp.step(state, next(iter(dp.feed(case.source, BATCH))))
