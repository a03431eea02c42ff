"""`fit`: epochs or steps, exact evaluation, records of every row, and a run folder."""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.settings import grouped
from support.tiers import only

import replicax as rx
from replicax.errors import ConfigError, DataError, DivergedError, LossError
from replicax.train.report import describe


def loss(model: Any, batch: Any, key: Any) -> Any:
    error = model["w"] * batch["x"] + model["b"] - batch["y"]
    return error**2, {"error": jnp.abs(error)}


def scalar_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((model["w"] * batch["x"] - batch["y"]) ** 2)


def line(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=rows).astype(np.float32)
    return {"x": x, "y": 2 * x + 1}


def model() -> dict[str, jax.Array]:
    return {"w": jnp.float32(0), "b": jnp.float32(0)}


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    """One for all tests, so that its step compiles once for each batch size."""
    return rx.DataParallel(loss, optax.sgd(0.1))


def fit(dp: rx.DataParallel, source: Any = None, **settings: Any) -> rx.Fit:
    source = line(40) if source is None else source
    settings = grouped({"batch_size": 16, "progress": False, **settings})
    return rx.fit(dp, dp.init(model()), source, **settings)


def of_kind(result: rx.Fit, kind: str) -> list[Any]:
    return [record for record in result.records if record.kind == kind]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "replicax-prefetch"]


def test_epochs_are_whole_passes(dp: rx.DataParallel) -> None:
    result = fit(dp, epochs=3)
    assert (result.steps, result.rows, result.interrupted) == (9, 120, False)
    assert int(result.state.step) == 9
    assert result.seconds > 0
    assert [record.epoch for record in of_kind(result, "train")] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("steps", "rows"), only([(3, 40), (7, 96)], [(1, 16), (2, 32), (3, 40), (4, 56), (7, 96)])
)
def test_steps_end_anywhere_in_an_epoch(dp: rx.DataParallel, steps: int, rows: int) -> None:
    result = fit(dp, steps=steps)
    assert (result.steps, result.rows) == (steps, rows)
    assert int(result.state.step) == steps
    assert not threads()


@pytest.mark.parametrize("log_every", only([2, 100], [1, 2, 5, 100]))
def test_records_have_rising_steps_and_every_row(dp: rx.DataParallel, log_every: int) -> None:
    result = fit(dp, epochs=4, log_every=log_every, eval_source=line(20, 1))
    steps = [record.step for record in of_kind(result, "train")]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert steps[-1] == 12
    assert set(range(log_every, 13, log_every)) <= set(steps)
    assert sum(record.rows for record in of_kind(result, "train")) == result.rows == 160
    assert [record.step for record in of_kind(result, "eval")] == [3, 6, 9, 12]
    assert [record.rows for record in of_kind(result, "eval")] == [20] * 4
    assert all(set(record.metrics) == {"loss", "error"} for record in result.records)


def test_it_learns(dp: rx.DataParallel) -> None:
    result = fit(dp, epochs=30, eval_source=line(40, 1))
    assert result.metrics == of_kind(result, "eval")[-1].metrics
    assert result.metrics["loss"] < 1e-3
    assert float(result.state.params["w"]) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("rows", only([37], [16, 37, 5]))
def test_evaluation_counts_every_row_once(dp: rx.DataParallel, rows: int) -> None:
    scored = line(rows, 1)
    result = fit(dp, epochs=1, eval_source=scored)
    w, b = (float(result.state.params[name]) for name in "wb")
    error = w * scored["x"].astype(np.float64) + b - scored["y"]
    (record,) = of_kind(result, "eval")
    assert record.rows == rows
    assert record.metrics["loss"] == pytest.approx(np.mean(error**2), rel=1e-5)
    assert record.metrics["error"] == pytest.approx(np.mean(np.abs(error)), rel=1e-5)


def test_evaluation_may_have_a_batch_size_of_its_own(dp: rx.DataParallel) -> None:
    small = fit(dp, epochs=1, eval_source=line(40, 1), eval_batch_size=8)
    large = fit(dp, epochs=1, eval_source=line(40, 1), eval_batch_size=40)
    assert small.metrics["loss"] == pytest.approx(large.metrics["loss"], rel=1e-5)


def test_a_run_in_steps_evaluates_at_its_end(dp: rx.DataParallel) -> None:
    result = fit(dp, steps=4, eval_source=line(16, 1))
    assert [record.step for record in of_kind(result, "eval")] == [3, 4]


def test_without_evaluation_the_metrics_are_the_last_steps(dp: rx.DataParallel) -> None:
    result = fit(dp, steps=4)
    assert result.metrics == of_kind(result, "train")[-1].metrics


def test_arrays_are_shuffled_anew_each_epoch_from_the_seed() -> None:
    seen: list[list[int]] = []

    def watched(model: Any, batch: Any, key: Any) -> Any:
        jax.debug.callback(lambda rows: seen.append(np.asarray(rows).tolist()), batch["row"])
        return model["w"] * batch["row"]

    def orders(**settings: Any) -> list[list[int]]:
        seen.clear()
        one = rx.DataParallel(watched, optax.sgd(0.0), mode="single")
        result = rx.fit(
            one,
            one.init({"w": jnp.float32(0)}),
            {"row": np.arange(16)},
            batch_size=16,
            epochs=2,
            progress=False,
            **settings,
        )
        jax.block_until_ready(result.state)
        jax.effects_barrier()
        return list(seen)

    first = orders(seed=1)
    assert [sorted(order) for order in first] == [list(range(16))] * 2
    assert first[0] != first[1]
    assert first == orders(seed=1)
    assert first != orders(seed=2)
    assert orders(shuffle=False) == [list(range(16))] * 2


def test_batches_of_a_loader_are_trained_on_as_they_come(dp: rx.DataParallel) -> None:
    rows = line(40)
    batches = [{name: each[at : at + 16] for name, each in rows.items()} for at in (0, 16, 32)]
    result = fit(dp, batches, batch_size=None, epochs=2)
    assert (result.steps, result.rows) == (6, 80)


def test_a_generator_lasts_one_epoch(dp: rx.DataParallel) -> None:
    def batches() -> Iterator[dict[str, np.ndarray]]:
        yield line(16)

    assert fit(dp, batches(), epochs=1).rows == 16
    with pytest.raises(DataError, match="read once"):
        fit(dp, batches(), epochs=2)
    with pytest.raises(DataError, match="read once"):
        fit(dp, batches(), steps=2)


def test_evaluation_on_a_loader_counts_every_row_once(dp: rx.DataParallel) -> None:
    rows = line(20, 1)
    batches = [{name: each[at : at + 16] for name, each in rows.items()} for at in (0, 16)]
    looped = fit(dp, epochs=2, eval_source=batches)
    whole = fit(dp, epochs=2, eval_source=rows)
    assert [record.rows for record in of_kind(looped, "eval")] == [20, 20]
    assert looped.metrics == pytest.approx(whole.metrics, rel=1e-6)


def test_a_generator_to_evaluate_on_is_refused_the_second_time_with_the_reason(
    dp: rx.DataParallel,
) -> None:
    with pytest.raises(DataError, match="read once"):
        fit(dp, epochs=2, eval_source=iter([line(16, 1)]))


def test_an_empty_source_ends_the_run(dp: rx.DataParallel) -> None:
    with pytest.raises(DataError, match="no batch"):
        fit(dp, [], steps=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["epochs=None", "steps=None", "give one"]),
        ({"epochs": 1, "steps": 1}, ["epochs=1", "steps=1", "give one"]),
        ({"epochs": 0}, ["epochs=0", "at least 1"]),
        ({"steps": -1}, ["steps=-1", "at least 1"]),
        ({"epochs": 1, "log_every": 0}, ["log_every=0", "at least 1"]),
        ({"epochs": 1, "batch_size": 0}, ["batch_size=0"]),
        ({"epochs": 1, "batch_size": 7}, ["7 rows", "8 replicas"]),
        ({"epochs": 1, "batch_size": None}, ["batch_size is missing"]),
        ({"epochs": 1, "eval_source": line(9), "eval_batch_size": 4}, ["4 rows", "8 replicas"]),
        ({"epochs": 1, "eval_source": line(9), "eval_batch_size": 0}, ["batch_size=0"]),
        ({"epochs": 1, "eval_source": 5}, ["int"]),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_written(
    dp: rx.DataParallel, settings: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(dp, run_dir=tmp_path / "run", **settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def run(dp: rx.DataParallel, tmp_path_factory: pytest.TempPathFactory) -> tuple[rx.Fit, Path]:
    folder = tmp_path_factory.mktemp("runs") / "first"
    result = fit(
        dp,
        epochs=3,
        log_every=2,
        eval_source=line(20, 1),
        run_dir=folder,
        config={"recipe": "a line", "path": Path("x")},
    )
    return result, folder


class TestRunFolder:
    def test_it_has_its_files_and_checkpoints(self, run: tuple[rx.Fit, Path]) -> None:
        names = sorted(path.name for path in run[1].iterdir())
        files = ["config.json", "curves.png", "goodput.jsonl", "records.jsonl"]
        assert names == sorted([*files, "checkpoints", "lease"])
        assert [path.name for path in (run[1] / "checkpoints").iterdir()] == ["step-000000009"]

    def test_without_checkpoints_it_has_three_files(
        self, dp: rx.DataParallel, tmp_path: Path
    ) -> None:
        fit(dp, steps=1, run_dir=tmp_path / "run", save_seconds=None)
        names = sorted(path.name for path in (tmp_path / "run").iterdir())
        assert names == ["config.json", "curves.png", "records.jsonl"]

    def test_every_record_is_a_line(self, run: tuple[rx.Fit, Path]) -> None:
        result, folder = run
        written = [json.loads(text) for text in (folder / "records.jsonl").read_text().splitlines()]
        assert len(written) == len(result.records)
        for line, record in zip(written, result.records, strict=True):
            assert line == json.loads(record.to_json())

    def test_the_config_has_what_was_given_and_what_was_derived(
        self, run: tuple[rx.Fit, Path]
    ) -> None:
        config = json.loads((run[1] / "config.json").read_text())
        assert (config["recipe"], config["path"]) == ("a line", "x")
        assert config["parallel"] == {
            "mode": "jit",
            "layout": "replicated",
            "precision": "float32",
            "accumulate": 1,
            "micro_shards": None,
            "reduction": "float32",
            "mesh": {"data": 8, "model": 1, "stage": 1},
            "device_kind": "cpu",
            "processes": 1,
        }
        data = config["data"]
        assert (data["rows"], data["batch_size"], data["padding"]) == (40, 16, 8)
        assert (data["shuffle"], data["seed"], set(data["leaves"])) == (True, 0, {"['x']", "['y']"})
        assert config["versions"]["jax"] == jax.__version__
        assert config["versions"]["replicax"]

    def test_the_curves_are_a_png(self, run: tuple[rx.Fit, Path]) -> None:
        content = (run[1] / "curves.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")

    def test_without_checkpoints_it_is_not_written_twice(
        self, dp: rx.DataParallel, run: tuple[rx.Fit, Path]
    ) -> None:
        before = (run[1] / "records.jsonl").read_bytes()
        with pytest.raises(ConfigError, match="another run"):
            fit(dp, epochs=1, run_dir=run[1], save_seconds=None)
        assert (run[1] / "records.jsonl").read_bytes() == before

    def test_records_without_a_configuration_are_another_runs(
        self, dp: rx.DataParallel, tmp_path: Path
    ) -> None:
        (tmp_path / "records.jsonl").write_text("mine\n")
        with pytest.raises(ConfigError, match="another run"):
            fit(dp, epochs=1, run_dir=tmp_path)
        assert (tmp_path / "records.jsonl").read_text() == "mine\n"

    def test_without_matplotlib_the_run_says_that_there_are_no_curves(
        self,
        dp: rx.DataParallel,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        result = fit(dp, steps=1, run_dir=tmp_path / "run", progress=True)
        assert result.steps == 1
        assert "no curves.png: matplotlib is not installed" in capsys.readouterr().out
        assert not (tmp_path / "run" / "curves.png").exists()


class TestDivergence:
    @pytest.fixture
    def wild(self) -> rx.DataParallel:
        return rx.DataParallel(loss, optax.sgd(1e6))

    def test_a_loss_that_is_no_longer_finite_ends_the_run(
        self, wild: rx.DataParallel, tmp_path: Path
    ) -> None:
        with pytest.raises(DivergedError, match=r"not finite in [5-9] steps in a row, \d+ to"):
            fit(wild, steps=100, log_every=1, run_dir=tmp_path / "run")
        lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
        written = [json.loads(text) for text in lines]
        skipped = [record["step"] for record in written if record["kind"] == "skip"]
        assert len(skipped) in range(5, 10)
        assert skipped == list(range(skipped[0], skipped[0] + len(skipped)))
        assert all(len(record["examples"]) for record in written if record["kind"] == "skip")
        losses = {r["step"]: r["metrics"]["loss"] for r in written if r["kind"] == "train"}
        assert None not in [losses[step] for step in range(1, skipped[0])]
        assert not threads()

    def test_a_run_that_diverged_has_its_curves(
        self, wild: rx.DataParallel, tmp_path: Path
    ) -> None:
        with pytest.raises(DivergedError):
            fit(wild, steps=100, log_every=1, run_dir=tmp_path / "run")
        assert (tmp_path / "run" / "curves.png").exists()

    def test_a_loss_that_never_was_finite_ends_the_run_as_well(self) -> None:
        with pytest.raises(DivergedError, match="in 3 steps in a row, 1 to 3"):
            fit(
                rx.DataParallel(loss, optax.sgd(0.1)),
                {"x": np.full(16, np.nan), "y": np.zeros(16)},
                epochs=9,
                guard=rx.Guard(most=3),
            )


@pytest.fixture(scope="module")
def scalar() -> rx.DataParallel:
    return rx.DataParallel(scalar_loss, optax.sgd(0.1))


class TestScalarLoss:
    """One number a batch is exact only where no batch has padding."""

    def test_it_trains_where_the_batch_size_divides_the_rows(self, scalar: rx.DataParallel) -> None:
        assert fit(scalar, line(48), epochs=1, eval_source=line(32, 1)).steps == 3

    def test_padding_in_the_last_batch_is_refused_at_the_first(
        self, scalar: rx.DataParallel
    ) -> None:
        state = scalar.init(model())
        with pytest.raises(LossError, match=r"8 of 16 rows.*one value a row"):
            rx.fit(scalar, state, line(40), batch_size=16, epochs=1, progress=False)
        assert int(state.step) == 0  # not consumed

    def test_padding_of_the_evaluation_is_refused_after_one_step(
        self, scalar: rx.DataParallel, tmp_path: Path
    ) -> None:
        with pytest.raises(LossError, match=r"12 of 16 rows"):
            fit(
                scalar,
                line(160),
                epochs=1,
                log_every=1,
                eval_source=line(20, 1),
                run_dir=tmp_path / "run",
            )
        assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 1

    def test_padding_that_nobody_could_foresee_is_refused_when_it_comes(
        self, scalar: rx.DataParallel
    ) -> None:
        with pytest.raises(LossError, match=r"11 of 16 rows"):
            fit(scalar, [line(16), line(16), line(5)], batch_size=None, epochs=1)


class TestInterrupt:
    @pytest.fixture
    def at_step_3(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = rx.DataParallel.step

        def pressing(dp: rx.DataParallel, state: rx.TrainState, batch: Any) -> Any:
            result = step(dp, state, batch)
            if int(result[0].step) == 3:
                signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(rx.DataParallel, "step", pressing)

    @pytest.mark.usefixtures("at_step_3")
    def test_ctrl_c_ends_the_run_after_the_step_with_everything_written(
        self, dp: rx.DataParallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = fit(
            dp,
            line(160),
            epochs=5,
            eval_source=line(16, 1),
            run_dir=tmp_path / "run",
            progress=True,
        )
        assert (result.interrupted, result.steps, int(result.state.step)) == (True, 3, 3)
        # No record of step 3: none was due, and who goes on leaves none.
        assert [(record.kind, record.step) for record in result.records] == [("train", 1)]
        assert result.rows == 48
        assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 1
        assert (tmp_path / "run" / "curves.png").exists()
        assert (tmp_path / "run" / "checkpoints" / "step-000000003").is_dir()
        assert (result.saved, result.exit_code) == (True, 75)
        how, last = capsys.readouterr().out.splitlines()[5:7]
        assert how.startswith("stopped after 3 of 50 steps, 48 rows in ")
        assert last.startswith("train  loss ")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not threads()

    @pytest.mark.usefixtures("at_step_3")
    def test_without_a_folder_all_is_recorded_up_to_the_step(self, dp: rx.DataParallel) -> None:
        result = fit(dp, line(160), epochs=5)
        assert [(record.kind, record.step) for record in result.records] == [
            ("train", 1),
            ("train", 3),
        ]
        assert sum(record.rows for record in result.records) == result.rows == 48
        assert (result.saved, result.exit_code) == (False, 1)

    def test_a_run_in_another_thread_works_without(self, dp: rx.DataParallel) -> None:
        results: list[rx.Fit] = []
        thread = threading.Thread(target=lambda: results.append(fit(dp, steps=2)))
        thread.start()
        thread.join()
        assert [result.steps for result in results] == [2]


class TestOutput:
    def test_what_is_derived_and_how_it_went_is_printed(
        self, dp: rx.DataParallel, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fit(dp, batch_size=13, epochs=2, eval_source=line(20, 1), progress=True)
        lines = capsys.readouterr().out.splitlines()
        assert lines[:5] == [
            "model  2 parameters in 2 arrays · float32",
            "mesh   8 cpu devices · 8 replicas · mode jit · layout replicated",
            "batch  13 rows, padded to 16, 8 replicas x 2 rows",
            "epoch  40 rows in 4 batches, the last with 1 row and 15 of padding",
            "compiling the step",
        ]
        assert [line.split(" · ")[0] for line in lines[5:7]] == ["epoch 1/2", "epoch 2/2"]
        assert all(" · eval loss " in line and " error " in line for line in lines[5:7])
        assert lines[7].startswith("done: 8 steps, 80 rows in ")
        assert lines[8].startswith("eval   loss ")
        assert len(lines) == 9
        assert all(len(line) <= 80 for line in lines)

    def test_micro_batches_and_one_device_are_described(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one = rx.DataParallel(loss, optax.sgd(0.1), mode="single", accumulate=4)
        fit(one, line(32), epochs=1, progress=True)
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == "mesh   1 cpu device · 1 replica · mode single · layout replicated"
        assert lines[2] == "batch  16 rows, 1 replica x 4 micro-batches x 4 rows"
        assert lines[3] == "epoch  32 rows in 2 batches"

    @pytest.mark.parametrize(
        ("sizes", "said"),
        [
            (
                {"model": 2, "fsdp": 2},
                ["split  each layer over 2 devices · the state over 2 of 4 replicas"],
            ),
            (
                {"model": 2, "stage": 2},
                [
                    "split  each layer over 2 devices",
                    "stages 2 x 4 micro-batches, gpipe · bubble 20%",
                ],
            ),
            ({}, []),
        ],
    )
    def test_how_a_replica_is_split_is_described(
        self, sizes: dict[str, int], said: list[str]
    ) -> None:
        layout = rx.layout("fsdp", rules=[("", P("stage", "model"))], schedule="gpipe")
        mesh = rx.make_mesh(**sizes)
        dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh, layout=layout, accumulate=4)
        lines = describe(dp, dp.init({"w": np.ones((2, 2))}), dp.feed(line(32), 32))
        assert lines[2:-2] == said

    def test_without_progress_nothing_is_printed(
        self, dp: rx.DataParallel, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        fit(dp, epochs=2, eval_source=line(20, 1), run_dir=tmp_path / "run")
        assert capfd.readouterr() == ("", "")


def test_a_state_that_was_trained_can_be_trained_on(dp: rx.DataParallel) -> None:
    first = fit(dp, steps=2)
    second = rx.fit(dp, first.state, line(40), batch_size=16, steps=2, progress=False)
    assert (second.steps, int(second.state.step)) == (2, 4)
