"""Compiled steps kept in the user's cache folder."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from replicax.analysis.compiled import Memory
from replicax.plan import kept
from replicax.plan.compilation import Compilation, Description, TooLarge
from replicax.plan.exported import ExportedStep
from replicax.plan.kept import KeepingCompiler

DONE = Compilation(Memory(1, 2, 3, 4), "HloModule step, é", 1.5)
STEP = ExportedStep(b"module", 2, {"data": 8}, 1, {"option": 3})
HOST = Description("cpu", 8, {})


class Counting:
    """A compiler that answers `answer` and counts its questions."""

    note = ""

    def __init__(self, answer: Compilation | TooLarge = DONE, name: str = "made up 1") -> None:
        self.answer, self.name, self.asked = answer, name, 0

    def compile(self, program: ExportedStep) -> Compilation | TooLarge:
        self.asked += 1
        return self.answer


def keeping(compiler: Counting, description: Description) -> KeepingCompiler:
    return KeepingCompiler(lambda: compiler, description, compiler.name)


def entries() -> list[Path]:
    return sorted((Path(os.environ["REPLICAX_CACHE"]) / "plans").iterdir())


@pytest.mark.parametrize("answer", [DONE, TooLarge(7, None)], ids=["compiled", "too large"])
def test_a_second_plan_compiles_nothing_and_says_so(answer: Compilation | TooLarge) -> None:
    first = keeping(Counting(answer), HOST)
    assert first.compile(STEP) == answer
    assert first.note == ""
    second = KeepingCompiler(lambda: pytest.fail("started"), HOST, "made up 1")
    assert second.compile(STEP) == answer
    assert second.note.startswith("1 of 1 compiled step ")
    assert str(entries()[0].parent) in second.note


def test_all_that_determines_an_answer_is_in_its_name() -> None:
    keeping(Counting(), HOST).compile(STEP)
    asked = [
        (Counting(), HOST, replace(STEP, module=b"other")),
        (Counting(), HOST, replace(STEP, donated=1)),
        (Counting(), HOST, replace(STEP, sizes={"data": 4, "model": 2})),
        (Counting(), HOST, replace(STEP, options={})),
        (Counting(), replace(HOST, devices=4), STEP),
        (Counting(), replace(HOST, topology={"topology_name": "v5e:2x4"}), STEP),
        (Counting(name="made up 2"), HOST, STEP),
    ]
    for compiler, description, program in asked:
        keeping(compiler, description).compile(program)
    assert [compiler.asked for compiler, *_ in asked] == [1] * len(asked)
    assert len(entries()) == 1 + len(asked)


@pytest.mark.parametrize("damage", [b"", b"x" * 400, "cut", "changed", "another"], ids=str)
def test_a_damaged_entry_is_compiled_again_and_repaired(damage: bytes | str) -> None:
    keeping(Counting(), HOST).compile(STEP)
    (path,) = entries()
    whole = path.read_bytes()
    keeping(Counting(TooLarge(7, None)), HOST).compile(replace(STEP, donated=1))
    (another,) = {*entries()} - {path}
    changed = bytes([whole[-1] ^ 1])
    damaged = {"cut": whole[:-5], "changed": whole[:-1] + changed, "another": another.read_bytes()}
    path.write_bytes(damaged[damage] if isinstance(damage, str) else damage)
    under = Counting()
    assert keeping(under, HOST).compile(STEP) == DONE
    assert under.asked == 1
    assert path.read_bytes() == whole


def test_those_not_used_for_longest_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = keeping(Counting(), HOST)
    programs = [replace(STEP, donated=count) for count in range(4)]
    for age, program in enumerate(programs[:3]):
        compiler.compile(program)
        (new,) = [each for each in entries() if each.stat().st_mtime > 10_000]
        os.utime(new, (1000 + age, 1000 + age))
    monkeypatch.setattr(kept, "_MOST_BYTES", 3 * entries()[0].stat().st_size + 10)
    compiler.compile(programs[0])  # now the last used
    compiler.compile(programs[3])
    under = Counting()
    again = keeping(under, HOST)
    for program in (programs[0], programs[2], programs[3]):
        again.compile(program)
    assert under.asked == 0
    again.compile(programs[1])
    assert under.asked == 1


@pytest.mark.parametrize("of_others", [False, True])
def test_a_folder_that_cannot_be_used_costs_only_time(of_others: bool) -> None:
    cache, number = Path(os.environ["REPLICAX_CACHE"]), errno.ENOTDIR
    if of_others:
        keeping(Counting(), HOST).compile(STEP)
        (cache / "plans").chmod(0o777)
        number = errno.EPERM
    else:
        cache.write_text("a file")
    under = Counting()
    compiler = keeping(under, HOST)
    assert compiler.compile(STEP) == compiler.compile(STEP) == DONE
    assert under.asked == 2
    assert f"[Errno {number}]" in compiler.note
