"""The noise scale of a run: correct within its stated range, kept, and without effect on it."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import CASES, DROPOUT_CASES
from support.command_line import REGRESSION, Main
from support.processes import run_job
from support.settings import grouped
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.errors import ConfigError
from replicax.train.files.fingerprint import sha256
from replicax.train.files.records import Record
from replicax.train.hooks.noise_scale import NoiseScale, load_noise_scale, noise_scale

DIM = 40
DEVIATION = 0.5
DISTANCE = 0.7
"""Distance of the parameters, which do not move, from the mean of the data."""
TRUTH = DIM * DEVIATION**2 / DISTANCE**2


def half_square(model: Any, batch: Any, key: Any) -> Any:
    """G is theta minus the mean of x, and the covariance that of x."""
    return 0.5 * jnp.sum((model["theta"] - batch["x"]) ** 2, axis=1)


def still(devices: int = 2) -> rx.DataParallel:
    return rx.DataParallel(half_square, optax.sgd(0.0), mesh=rx.make_mesh(data=devices))


def batches(rows: int, count: int, distance: float = DISTANCE) -> list[Any]:
    """Return new batches, so that the noise scale is that of the distribution."""
    generator = np.random.default_rng(7)
    mean = np.full(DIM, distance / math.sqrt(DIM))
    drawn = mean + DEVIATION * generator.normal(size=(count, rows, DIM))
    return [{"x": x.astype(np.float32)} for x in drawn]


def fit(dp: rx.DataParallel, source: Any, model: Any = None, **settings: Any) -> rx.types.Fit:
    state = dp.init({"theta": jnp.zeros(DIM)} if model is None else model)
    return rx.fit(dp, state, source, progress=False, **grouped(settings))


def measured(dp: rx.DataParallel, source: Any, every: int, **settings: Any) -> NoiseScale:
    noise = rx.hooks.NoiseMeter(every)
    fit(dp, source, noise=noise, **settings)
    assert noise.scale is not None
    return noise.scale


def samples(pairs: Any, first: int = 1) -> list[Record]:
    """Return records of `[samples, 2]`: |G|² and the trace."""
    names = ("squared_gradient_norm", "trace")
    metrics = [dict(zip(names, map(float, pair), strict=True)) for pair in pairs]
    return [Record("noise", first + i, 0, each, 64, 0.0) for i, each in enumerate(metrics)]


def later(pairs: Any) -> NoiseScale:
    """Return the noise scale of samples from the later half of a run."""
    return noise_scale(samples(pairs, len(pairs)))


def test_a_quadratic_has_the_noise_scale_of_its_closed_form() -> None:
    found = measured(still(), batches(16, 200), 2, epochs=1)
    assert found.low < TRUTH < found.high
    assert found.high < 1.4 * found.low  # a wide range would show nothing
    assert found.squared_gradient_norm == pytest.approx(DISTANCE**2, rel=0.15)
    assert found.trace == pytest.approx(DIM * DEVIATION**2, rel=0.05)
    assert (found.samples, found.left_out, found.batch_rows) == (50, 0, 16)
    assert (found.first_step, found.last_step) == (102, 200)


def test_without_a_gradient_there_is_no_upper_end() -> None:
    found = measured(still(), batches(16, 80, distance=0.0), 2, epochs=1)
    assert not found.resolved
    assert 16 < found.low < math.inf
    assert "B_simple above" in str(found)
    assert "measure longer" in str(found)


@pytest.mark.parametrize("square", [4.0, 1.0, 0.3])
def test_the_range_holds_the_truth_as_often_as_it_says(square: float) -> None:
    """|G|² is 4, 1 and 0.3 times the error of one sample; 12 samples."""
    generator = np.random.default_rng(11)
    held, trials = 0, 1000
    for _ in range(trials):
        errors = generator.normal(size=(12, 2)) @ [[1.0, -0.4], [0.0, 0.9]]
        found = later(np.array([square, 10.0]) + errors)
        held += found.low <= 10.0 / square <= found.high
    # Three standard errors of a share of 95 % are 2 %. Lower ends that are cut at 0 lose nothing.
    assert held / trials > 0.93
    assert held / trials < 0.97


def test_means_are_divided_and_not_ratios_averaged() -> None:
    found = later([(1.0, 8.0), (3.0, 8.0), (1.0, 8.0), (3.0, 8.0), (2.0, 8.0)])
    assert found.rows == pytest.approx(4.0)  # the mean of the ratios is 5.1


def test_few_samples_bound_nothing() -> None:
    found = later([(2.0, 8.0)] * 4)
    assert (found.rows, found.low, found.high) == (4.0, 0.0, math.inf)
    assert "not resolved" in str(found)
    none = noise_scale([])
    assert (none.samples, none.low, none.high, none.rows) == (0, 0.0, math.inf, math.inf)
    assert "0 samples" in str(none)


def test_samples_that_are_not_finite_are_left_out_and_counted() -> None:
    found = later([(2.0, 8.0), (math.nan, 8.0), (2.0, math.inf), *[(2.0, 8.0)] * 5])
    assert (found.samples, found.left_out, found.rows) == (6, 2, 4.0)
    assert "6 samples, 2 left out" in str(found)


def test_the_first_half_of_a_run_does_not_count() -> None:
    early, late = samples([(9.0, 1.0)] * 10, 1), samples([(2.0, 8.0)] * 10, 11)
    found = noise_scale([*early, *late])
    assert (found.rows, found.samples, found.first_step) == (4.0, 10, 11)


def test_a_line_of_80_columns() -> None:
    generator = np.random.default_rng(0)
    scale = later(np.array([1.0, 123_456.0]) + generator.normal(size=(1000, 2)) / 300)
    assert scale.resolved
    assert len(f"noise  {scale}") <= 80
    assert "123,000 rows (95%: " in str(scale)


CASES_OF_METERS = [
    *(("nnx", mode) for mode in ("jit", "shard_map", "single")),
    *(("linen", mode) for mode in ("exact", "pmap")),
    ("gpt2", "single"),
]


@pytest.mark.parametrize(
    ("name", "mode"),
    only([("nnx", "jit")], CASES_OF_METERS, sampled=CASES_OF_METERS[:-1]),
)
@pytest.mark.usefixtures("optimized")
def test_the_training_has_the_same_bits_with_and_without(name: str, mode: str) -> None:
    """With BatchNorm's statistics, and Dropout's masks."""
    case = DROPOUT_CASES.get(name, CASES[name])
    mesh = rx.make_mesh(data=1 if mode == "single" else 4)
    states, told = [], []
    for noise in (None, rx.hooks.NoiseMeter(1)):
        dp = rx.DataParallel(case.loss, optax.adamw(1e-2), mesh=mesh, mode=mode)
        settings: dict[str, Any] = {"batch_size": 16, "epochs": 2, "log_every": 1}
        settings |= {"eval_source": case.source, "noise": noise}
        result = fit(dp, case.source, case.model(), **settings)
        states.append(sha256(result.state))
        kept = [r for r in result.records if r.kind != "noise"]
        told.append(([(r.kind, r.step, r.metrics, r.rows) for r in kept], result.metrics))
    assert states[0] == states[1]
    assert told[0] == told[1]
    assert noise is not None
    assert noise.scale is not None
    assert noise.scale.samples == 4
    assert sum(r.kind == "noise" for r in result.records) == 8


def test_a_sample_is_no_metric_of_the_run() -> None:
    result = fit(still(), batches(16, 1), steps=1, noise=rx.hooks.NoiseMeter(1))
    assert [record.kind for record in result.records] == ["noise", "train"]
    assert set(result.metrics) == {"loss"}


def test_what_was_measured_is_kept_and_read(tmp_path: Path) -> None:
    found = measured(still(), batches(16, 30), 1, epochs=1, run_dir=tmp_path / "a")
    assert load_noise_scale(tmp_path / "a") == found
    assert load_noise_scale(tmp_path / "a" / "noise_scale.json") == found


def test_what_is_not_finite_is_kept_as_null(tmp_path: Path) -> None:
    noise_scale([]).save(tmp_path)
    fields = json.loads((tmp_path / "noise_scale.json").read_text())
    assert fields["rows"] is fields["high"] is fields["trace"] is None
    found = load_noise_scale(tmp_path)
    assert (found.rows, found.high) == (math.inf, math.inf)
    assert math.isnan(found.trace)


@pytest.mark.parametrize(
    "text", [b"\xff", b"{", b"[]", b"7", b'{"rows": 3.0}', b'{"parallel": null}']
)
def test_another_file_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(
        ConfigError, match=r"config\.json\b.*\bnoise scale\b.*--measure-noise-scale"
    ):
        load_noise_scale(file)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"{os.strerror(errno.ENOENT)}.*--measure-noise-scale"):
        load_noise_scale(tmp_path)


@pytest.mark.parametrize(("every", "rows", "why"), [(0, 4, "at least 1"), (1, 1, "1 row has")])
def test_what_cannot_be_measured_is_refused(every: int, rows: int, why: str) -> None:
    source = batches(8, 1)[0]
    with pytest.raises(ConfigError, match=why):
        fit(still(1), source, batch_size=rows, steps=1, noise=rx.hooks.NoiseMeter(every))


@EXHAUSTIVE
def test_processes_measure_what_one_measures(main: Main, folder: Path) -> None:
    flags = [*REGRESSION, "--epochs", "40", "--measure-noise-scale", "--devices", "2"]
    code, _, err = main(*flags, "--run", "one")
    assert code == 0, err
    first, second = run_job("-m", "replicax", *flags, "--run", "two")
    assert (first.code, second.code) == (0, 0), first.err
    assert "noise  B_simple" in first.out
    assert "noise" not in second.out
    one, two = (load_noise_scale(folder / "runs" / name) for name in ("one", "two"))
    assert two.samples == one.samples
    assert two.trace == pytest.approx(one.trace, rel=1e-4)
