"""Commands that are refused: one line with the words that matter, exit code 2, nothing written."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from support.command_line import REGRESSION, Main, one_line, refusal
from support.recipe_runs import MLP, Ended

import replicax as rx

TELLS_ITS_DATA = ("train", "bench", "plan", "verify")
LINE = "train linear_regression --points 48 --batch-size 16 --epochs 3"
BENCH = "bench linear_regression --points 64 --batch-size 16 --rounds 1"
PLAN = "plan linear_regression --points 48 --target h100:8 --by-formula"
REFUSED = {
    "": [
        ("trian", "'trian'", "train, evaluate, sample, ", "mean 'train'"),
        ("recipes extra", "'extra'"),
    ],
    "train": [
        ("", "needs a recipe", "replicax recipes"),
        ("--devices 2", "needs a recipe", "replicax recipes"),
        ("linear_regresion", "'linear_regresion'", "mean 'linear_regression'"),
        ("mlp --preset sead", "'sead'", "MLP are seed", "mean 'seed'"),
        ("mlp --preset", "--preset without", "seed"),
        ("mlp --preset=", "--preset without", "seed"),
        ("mlp --preset --steps 1", "--preset without", "seed"),
        ("mlp --preset seed --preset=seed", "--preset", "2 times", "one"),
        ("mlp --prest seed", "'--prest'", "mean '--preset'"),
        ("lenet --model-parallel 2", "--model-parallel 2", "lenet", "rules()"),
        ("mlp --stages 3", "8 devices", "--stages 3", "divide"),
        ("mlp --stages 2 --model-parallel 3", "--model-parallel 3 --stages 2", "6"),
        ("mlp --devices 2 --model-parallel 4", "2 devices", "--model-parallel 4"),
        ("gpt2 --heads 4 --width 16 --model-parallel 8", "--model-parallel 8", "heads=4"),
        ("mlp --stages 0", "--stages 0", "at least 1"),
        ("mlp --model-parallel -1", "--model-parallel -1", "at least 1"),
        ("mlp --fsdp-size 2", "--fsdp-size 2", "--layout replicated", "zero1"),
        ("mlp --fsdp-size 1 --layout fsdp", "--fsdp-size 1", "at least 2"),
        ("mlp --stages 2 --mode shard_map", "shard_map", "8 devices", "'jit'"),
        ("mlp --model-parallel 2 --mode single", "single", "8 devices", "'jit'"),
        ("mlp --stages 2 --schedule gp", "'gp'", "--schedule"),
    ],
    " ".join(REGRESSION): [
        ("--epocs 3", "'--epocs'", "mean '--epochs'", "--help"),
        ("--learning-rte=3", "'--learning-rte=3'", "mean '--learning-rate'"),
        ("--preset seed", "'--preset'", "no presets"),
        ("--zzz", "'--zzz'", "--help"),
        ("stray", "'stray'", "--help"),
        ("--points many", "--points", "'many'", "--help"),
        ("--points", "--points", "--help"),
        ("--mode both", "'both'", "--mode", "jit", "shard_map", "--help"),
        ("--layout fdsp", "'fdsp'", "--layout", "fsdp", "--help"),
        ("--precision float8", "'float8'", "bfloat16", "--help"),
        ("--mode exact --layout fsdp", "exact", "fsdp", "'jit'"),
        ("--mode pmap --layout zero1", "pmap", "zero1", "'jit'"),
        ("--mode single --devices 2", "single", "2 devices", "1"),
        ("--devices 16", "16", "8 attached", "at most 8"),
        ("--devices 0", "--devices 0", "at least 1"),
        ("--batch-size 0", "--batch-size 0", "at least 1"),
        ("--batch-size 7", "7 rows", "8 replicas", "at least 8"),
        ("--batch-size 16 --accumulate 4", "16 rows", "4 micro", "32"),
        ("--accumulate 0", "--accumulate 0", "at least 1"),
        ("--points 0", "--points 0"),
        ("--steps 0", "--steps 0", "at least 1"),
        ("--epochs 0", "--epochs 0", "at least 1"),
        ("--log-every 0", "--log-every 0", "at least 1"),
        ("--seed -1", "--seed -1", "at least 0"),
    ],
    LINE: [
        ("--keep-best los", "'los'", "'loss'"),
        ("--early-stopping accuracy:2", "'accuracy'", "loss"),
        ("--audit-every 5 --devices 1", "1 device"),
        ("--measure-noise-scale --batch-size 1 --devices 1", "batch_size=1"),
    ],
    " ".join(["train", *MLP]): [
        ("--send int4", "--send", "--every"),
        ("--outer-rate 0.1", "--outer-rate", "--every"),
        ("--every 30 --fragments 4", "every=30", "fragments=4"),
        ("--every 30 --delay 30", "delay=30", "29"),
        ("--every 30 --island-axis data", "'shard_map'", "mode='jit'"),
        ("--every 0", "--every"),
        ("--every 3 --send int3", "--send", "int3"),
    ],
    BENCH: [
        ("--devices 1,two", "'1,two'", "1,2,4"),
        ("--run ../out", "--run '../out'", "runs/"),
        ("--devices ''", "--devices ''", "1,2,4"),
        ("--devices 8 --pin", "8 devices", "cores"),
        ("--processes 1,two", "--processes '1,two'", "1,2,4"),
        ("--processes 1 --devices 1,2", "--processes 1 with --devices", "one"),
        ("--layouts zero1 --layout fsdp", "--layouts zero1 with --layout fsdp", "one"),
        ("--layouts zero1 --profile", "--layouts zero1 with --profile"),
        ("--layouts zero1 --processes 1", "--processes 1 with --layouts"),
        ("--processes 1 --profile", "--processes 1 with --profile"),
        ("--processes 1 --rounds 0", "--rounds 0", "at least 1"),
        ("--processes 1 --batch-size 1 --accumulate 2", "1 rows", "2"),
        ("--precision float8", "'float8'", "--help"),
    ],
    "plan": [
        ("", "plan needs a recipe"),
        ("linear_regresion", "linear_regression"),
        ("mlp --target h100:8 --by-formula --layers 4 --stages 3", "8 devices over stage=3"),
    ],
    "plan linear_regression --points 48": [
        ("--target h10:8", "hardware 'h10'", "h100"),
    ],
    PLAN: [
        ("--mode single", "has 8 devices", "leave it out"),
        ("--noise-scale 0", "--noise-scale 0", "above 0"),
        ("--noise-scale nan", "--noise-scale nan", "above 0"),
        ("--noise-scale runs/none", "runs/none"),
        ("--json-file no/such.json", "no folder no"),
        ("--json-file .", "is a folder"),
        ("--accumulate 0", "--accumulate 0"),
        ("--tokens -5", "--tokens -5", "above 0"),
        ("--devices 2", "--devices"),
        ("--run ../out", "--run '../out'", "runs/"),
    ],
    "launch": [
        ("", "--processes"),
        ("--processes 2", "without a command", "-- python train.py"),
        ("--processes 2 --", "nothing after --", "-- python train.py"),
        ("--processes 2 python train.py", "without a command", "-- python train.py"),
        ("--processes two -- true", "--processes", "'two'"),
        ("-- true", "--processes"),
        ("--proceses 2 -- true", "'--proceses'", "mean '--processes'"),
        ("--processes 2 --pinned -- true", "'--pinned'", "mean '--pin'"),
        ("--islands 0 -- true", "--islands 0", "at least 1"),
        ("--islands 99 --processes 99 -- true", "--processes 99", "--islands 99"),
        ("--islands 2 --restarts -1 -- true", "--restarts -1"),
        ("--on slurm --islands 0 -- true", "islands", "0", "at least 1"),
        ("--processes 1 --grace -1 -- true", "--grace -1"),
        ("--processes 1 --grace nan -- true", "--grace nan"),
        ("--processes 1 --grace inf -- true", "--grace inf"),
        ("--processes 1 --grace 1e300 -- true", "--grace 1e+300", "604,800"),
        ("--processes 100000 -- true", "--processes 100000", "4096"),
        ("--processes 1 --devices-per-process 4097 -- true", "-process 4097", "4,096"),
        ("--processes 1 --on slrum -- true", "--on", "slurm"),
        ("--processes 1 --logs file/logs -- true", "file/logs", "--logs"),
    ],
    "doctor": [
        ("--largest-mb 0", "--largest-mb 0", "above 0"),
        ("--timeout -1", "--timeout -1"),
        ("--timeout nan", "--timeout nan"),
        ("--jsno", "'--jsno'", "mean '--json'"),
        ("--json found.json", "'found.json'", "--json-file"),
    ],
    "lint": [
        ("", "no files to read"),
        ("gone.py", "no such file"),
        ("gone.py --json-file no/such.json", "no folder no"),
    ],
    "verify": [
        ("", "needs a recipe"),
        ("--step a.py:f", "--reference", "required"),
        ("--source a.py", "replicax lint"),
        ("linear_regression --json-file no/such.json", "no folder no"),
        ("linear_regression --json-file .", "is a folder"),
        ("linear_regression --devices 0", "--devices 0"),
        ("linear_regression --modes jitt", "mean 'jit'"),
        ("linear_regression --points 3", "the source has 3 rows"),
    ],
}
UNBEGUN = {
    LINE: [
        ("--profile 5:4", "5", "4"),
        ("--profile soon", "'soon'", "100:110"),
        ("--eval-every 0", "--eval-every 0"),
        ("--eval-every-epochs -1", "--eval-every-epochs -1"),
        ("--eval-rows 0", "--eval-rows 0"),
        ("--early-stopping loss:0", "patience=0"),
        ("--early-stopping loss:many", "--early-stopping loss:many", "accuracy:5"),
        ("--early-stopping :3", "--early-stopping :3"),
        ("--keep-best loss --save-minutes 0", "--keep-best", "--save-minutes"),
        ("--log-to csv,tensorbord", "'tensorbord'", "'tensorboard'"),
        ("--keep 0", "--keep 0"),
    ],
}
OF_RUNS = {
    "evaluate": [
        ("mlq", "'mlq'", "runs/mlq", "mean 'mlp'", "replicax runs"),
        ("runs", "runs is not"),
        ("''", '""'),
        ("mlp --step some", "--step some", "best"),
        ("mlp --step 7", "step 7", "8, 6, 3"),
        ("mlp --step best", "best.json"),
        ("mlp --data x", "mlp", "--data"),
        ("mlp --json-file=no/where.json", "no folder no"),
        ("mlp stray", "'stray'", "--help"),
        ("", "RUN", "--help"),
    ],
    "export": [
        ("mlp no/where.safetensors", "no folder no"),
        ("mlp runs", "runs is a folder"),
        ("mlp", "FILE", "--help"),
        ("mpl x.safetensors", "mean 'mlp'"),
    ],
    "sample": [
        ("mlp a", "mlp", "gpt2"),
        ("gpt2 a --temperature=-1", "--temperature -1"),
        ("gpt2 a --tokens=-1", "--tokens -1"),
        ("gpt2", "TEXT", "--help"),
        ("mlq a", "mean 'mlp'"),
    ],
}


def cases(table: dict[str, list[tuple[str, ...]]]) -> Any:
    """Parametrize a test by the rows of `table`: the rest of a command, and words of the line."""
    rows = [(f"{begin} {flags}", words) for begin in table for flags, *words in table[begin]]
    return pytest.mark.parametrize(("command", "words"), rows, ids=[row[0].strip() for row in rows])


@cases(REFUSED)
def test_a_user_error_is_one_line_and_exit_code_2(
    command: str, words: list[str], main: Main, folder: Path
) -> None:
    (folder / "file").write_text("")
    code, out, err = main(*shlex.split(command))
    assert code == 2
    assert out == "" or command.startswith(TELLS_ITS_DATA)
    assert [word for word in words if word not in one_line(err)] == []
    assert [path.name for path in folder.iterdir()] == ["file"]


@cases(UNBEGUN)
def test_a_wrong_value_is_refused_before_anything_is_compiled(
    command: str, words: list[str], main: Main, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rx.DataParallel, "init", None)
    line = refusal(main, *shlex.split(command))
    assert [word for word in words if word not in line] == []
    assert list(folder.iterdir()) == []


@cases(OF_RUNS)
def test_so_it_is_where_runs_are(
    command: str, words: list[str], main: Main, there: dict[str, Ended]
) -> None:
    for name in ("mlp", *(["gpt2"] if "gpt2" in command else [])):
        assert there[name].folder.is_dir()
    line = refusal(main, *shlex.split(command))
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("command", [BENCH, PLAN])
def test_a_folder_that_is_there_is_left_alone(command: str, main: Main, folder: Path) -> None:
    (folder / "runs/mine").mkdir(parents=True)
    assert "runs/mine exists" in refusal(main, *command.split(), "--run", "mine")
    assert not list((folder / "runs/mine").iterdir())


@pytest.mark.parametrize("command", [BENCH, "evaluate mlp"])
def test_a_process_of_several_is_refused(
    command: str, main: Main, there: dict[str, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    assert "process 1 of 2" in refusal(main, *command.split())
