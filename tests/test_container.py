"""The container image, built where there is a builder, and `make train`: their parts exist."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def of(name: str) -> list[str]:
    """Return the arguments of all instructions of that name."""
    return [arguments for instruction, arguments in INSTRUCTIONS if instruction == name]


def in_context(path: str) -> bool:
    """Return whether .dockerignore lets a path of the repository through."""
    return f"!{path}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()


def test_the_builder_gets_what_is_copied_and_the_package_is_built_from() -> None:
    copied = {word for each in of("COPY") for word in each.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    built_from = {
        "README.md",
        "hatch_build.py",
        *(name.partition("/")[0] for name in project["license-files"]),
    }
    assert built_from <= copied
    for each in copied:
        assert (ROOT / each).exists(), each
        assert in_context(each), each


def test_every_extra_that_is_named_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/processes.md").read_text(encoding="utf-8")
    named = re.findall(r"EXTRAS=([\w,-]+)", TEXT + page)
    assert len(named) >= 3
    assert {name for each in named for name in each.split(",")} <= set(
        project["optional-dependencies"]
    )
    kinds = {each.split()[-1] for each in of("FROM")} - {"${JAX}"}
    assert kinds <= set(importlib.metadata.metadata("jax").get_all("Provides-Extra"))
    assert set(re.findall(r"JAX=(\w+)", TEXT + page)) <= kinds


def installing(context: Path) -> str:
    """Return the script of the instruction that installs, after copying what it needs."""
    for each in of("COPY"):
        for name in each.split()[:-1]:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, context / name)
    (script,) = (each for each in of("RUN") if "pip install" in each)
    return script


def test_the_lock_is_read_whole(tmp_path: Path) -> None:
    script = installing(tmp_path).partition("&&")[0]
    subprocess.run(script, shell=True, cwd=tmp_path, check=True)
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    constraints = (tmp_path / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert constraints == [line[:-2] for line in lock.splitlines() if re.match(r"\w.*==", line)]
    assert script.split("'")[1] in made("train")


def made(target: str) -> str:
    """Return the commands of a target of the Makefile, none of which is run."""
    command = ["make", "--dry-run", "--always-make", target]
    alone = {"PATH": os.environ["PATH"]}  # without the variables of a make that runs the tests
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    return done.stdout


def test_training_from_a_clone_leaves_the_environment_of_the_tests_alone() -> None:
    commands = made("train")
    assert "--editable '.[all]'" in commands
    assert ".venv-train/bin/replicax" in commands
    assert ".venv/" not in commands


@pytest.mark.exhaustive
@pytest.mark.everything
def test_its_install_works_in_an_empty_environment(tmp_path: Path) -> None:
    script = installing(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    path = f"{tmp_path}/venv/bin:/usr/bin:/bin"
    done = subprocess.run(
        f"export PATH={path} JAX=cpu EXTRAS=all; {script} && replicax recipes",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "lenet" in done.stdout


def builder() -> str | None:
    """Return a program that builds images here, or None."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and not subprocess.run([name, "info"], capture_output=True).returncode
        ):
            return name
    return None


@pytest.mark.exhaustive
def test_it_is_built_and_runs() -> None:
    program = builder()
    if program is None:
        pytest.skip("neither docker nor podman works here")
    pull = subprocess.run([program, "pull", "python:3.12-slim"], capture_output=True, text=True)
    if pull.returncode:
        pytest.skip(f"the image of Python cannot be had: {pull.stderr[-200:]}")
    name = "replicax-test"
    subprocess.run([program, "build", "--tag", name, ROOT], check=True)
    ran = [program, "run", "--rm", name, "replicax", "recipes"]
    assert "lenet" in subprocess.run(ran, capture_output=True, text=True, check=True).stdout
