"""Files and lines that `fit` writes: to the end, to a divergence, to Ctrl-C."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.figures import assert_mentions, figures
from support.fitted_line import fit, line, loss
from support.waiting import Threads

import replicax as rx
from replicax.errors import ConfigError, DivergedError
from replicax.train.run.summary import describe


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    """One for all tests, so that its step compiles once for each batch size."""
    return rx.DataParallel(loss, optax.sgd(0.1))


@pytest.fixture(scope="module")
def run(dp: rx.DataParallel, tmp_path_factory: pytest.TempPathFactory) -> tuple[rx.types.Fit, Path]:
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
    def test_the_config_has_what_was_given_and_what_was_derived(
        self, run: tuple[rx.types.Fit, Path]
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
        assert config["settings"]["jax_threefry_partitionable"] == "True"

    def test_without_checkpoints_it_is_not_written_twice(
        self, dp: rx.DataParallel, run: tuple[rx.types.Fit, Path]
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


class TestDivergence:
    @pytest.fixture
    def wild(self) -> rx.DataParallel:
        return rx.DataParallel(loss, optax.sgd(1e6))

    def test_a_loss_that_is_no_longer_finite_ends_the_run(
        self, wild: rx.DataParallel, tmp_path: Path, prefetching: Threads
    ) -> None:
        with pytest.raises(DivergedError, match=r"not finite\b.*[5-9] steps in\b.*\d+ to"):
            fit(wild, steps=100, log_every=1, run_dir=tmp_path / "run")
        lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
        written = [json.loads(text) for text in lines]
        skipped = [record["step"] for record in written if record["kind"] == "skip"]
        assert len(skipped) in range(5, 10)
        assert skipped == list(range(skipped[0], skipped[0] + len(skipped)))
        assert all(len(record["examples"]) for record in written if record["kind"] == "skip")
        losses = {r["step"]: r["metrics"]["loss"] for r in written if r["kind"] == "train"}
        assert None not in [losses[step] for step in range(1, skipped[0])]
        assert (tmp_path / "run" / "curves.png").exists()
        assert not prefetching()


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
        self,
        dp: rx.DataParallel,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        prefetching: Threads,
    ) -> None:
        with pytest.raises(KeyboardInterrupt) as stopped:
            fit(
                dp,
                line(160),
                epochs=5,
                log_every=50,
                eval_source=line(16, 1),
                run_dir=tmp_path / "run",
                progress=True,
            )
        result = stopped.value.result
        assert (result.interrupted, result.steps, int(result.state.step)) == (True, 3, 3)
        # No record of step 3: none was due, and the resumed run leaves none.
        assert [(record.kind, record.step) for record in result.records] == [("train", 1)]
        assert result.rows == 48
        assert len((tmp_path / "run" / "records.jsonl").read_text().splitlines()) == 1
        assert (tmp_path / "run" / "curves.png").exists()
        assert (tmp_path / "run" / "checkpoints" / "3").is_dir()
        assert (result.saved, result.exit_code) == (True, 75)
        how, last = capsys.readouterr().out.splitlines()[5:7]
        assert how.startswith("stopped after 3 of 50 steps, 48 rows in ")
        assert last.startswith("train  of step 1: loss ")
        assert (result.metrics_step, result.evaluation) == (1, None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not prefetching()

    @pytest.mark.usefixtures("at_step_3")
    def test_without_a_folder_all_is_recorded_up_to_the_step(self, dp: rx.DataParallel) -> None:
        with pytest.raises(KeyboardInterrupt) as stopped:
            fit(dp, line(160), epochs=5, log_every=50)
        result = stopped.value.result
        assert [(record.kind, record.step) for record in result.records] == [
            ("train", 1),
            ("train", 3),
        ]
        assert sum(record.rows for record in result.records) == result.rows == 48
        assert (result.saved, result.exit_code) == (False, 1)

    def test_a_run_in_another_thread_works_without(self, dp: rx.DataParallel) -> None:
        results: list[rx.types.Fit] = []
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
        assert [figures(line) for line in lines[:4]] == [
            ["2", "2"],
            ["8", "8"],
            ["13", "16", "8", "2"],
            ["40", "4", "1", "15"],
        ]
        assert_mentions(lines[0], "2 parameters", "2 arrays · float32")
        assert lines[1].endswith("8 replicas · mode jit · layout replicated")
        assert_mentions(lines[2], "padded to 16, 8 replicas x 2 rows")
        assert_mentions(lines[3], "40 rows", "4 batches", "1 row", "15 of padding")
        names = ["model", "mesh", "batch", "epoch", "compiling"]
        assert [line.split()[0] for line in lines[:5]] == names
        assert [line.split(" · ")[0] for line in lines[5:7]] == ["epoch 1/2", "epoch 2/2"]
        assert all(" · eval loss " in line and " error " in line for line in lines[5:7])
        assert lines[7].startswith("done: 8 steps, 80 rows in ")
        assert lines[8].startswith("eval   loss ")
        assert len(lines) == 9
        assert all(len(line) <= 80 for line in lines)

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
