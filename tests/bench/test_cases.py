"""The cases that are measured, and the reasons for those left out."""

import re

import pytest
from support.figures import figures, refused

from replicax.bench import machine
from replicax.bench.cases import (
    BenchCase,
    all_cases,
    default_devices,
    device_counts,
    notes_on_cases,
    possible_modes,
)
from replicax.bench.machine import notes_on_machine, notes_on_neighbours
from replicax.errors import ConfigError


def test_the_scalings_meet_on_the_most_devices() -> None:
    cases = all_cases(32, (1, 4), ["single", "jit"], weak=True)
    assert cases == [
        BenchCase("single", 1, 32, ("strong",)),
        BenchCase("jit", 1, 32, ("strong",)),
        BenchCase("jit", 1, 8, ("weak",)),
        BenchCase("jit", 4, 32, ("strong", "weak")),
    ]
    assert notes_on_cases(32, cases, 1) == []


def test_rows_that_do_not_divide_are_rounded_up_and_noted() -> None:
    cases = all_cases(30, (1, 4), ["pmap"], weak=True)
    assert cases == [
        BenchCase("pmap", 1, 30, ("strong",)),
        BenchCase("pmap", 1, 8, ("weak",)),
        BenchCase("pmap", 4, 30, ("strong",)),
        BenchCase("pmap", 4, 32, ("weak",)),
    ]
    notes = notes_on_cases(30, cases, 1)
    assert list(map(figures, notes)) == [["30", "4", "8", "32", "4"], ["30", "32", "4"]]
    assert "weak scaling" in notes[0]
    assert re.fullmatch(r"30 rows .*padded to 32 on 4 devices", notes[1])


def test_a_source_that_cannot_be_cut_has_no_weak_scaling() -> None:
    cases = all_cases(32, (1, 2), ["jit"], weak=False)
    assert {case.scalings for case in cases} == {("strong",)}
    assert len(cases) == 2


@pytest.mark.parametrize(
    ("attached", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_default_devices_are_powers_of_two_and_all(attached: int, counts: tuple[int, ...]) -> None:
    assert default_devices(attached) == counts


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ((), "at least 1"),
        ((0, 1), "devices=0"),
        ((1, 9), "devices=9 and 8 attached (cpu); use at most 8, or start with JAX_NUM_CPU_DEV"),
    ],
)
def test_device_counts_that_cannot_be_are_refused(devices: tuple[int, ...], says: str) -> None:
    with refused(ConfigError, says):
        device_counts(devices, 8, "cpu")


def test_modes_that_cannot_hold_a_layout_are_left_out_with_the_reason() -> None:
    kept, notes = possible_modes(["single", "jit", "pmap"], (1, 2), "fsdp")
    assert kept == ["jit"]
    assert all("skipped: " in note for note in notes)
    assert [note.split()[0] for note in notes] == ["single", "pmap"]
    assert "mode='pmap' with layout='fsdp'" in notes[1]


def test_no_mode_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^0 cases .*\(pmap .*skipped"):
        possible_modes(["pmap"], (1, 2), "zero1")


def test_shared_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "core_count", lambda: 4)
    (note,) = notes_on_machine(4, "cpu", pinned=False)
    assert figures(note) == ["4", "4", "4"]
    assert re.match(r"4 devices share 4 cores: efficiency .*4 machines; --pin", note)
    assert notes_on_machine(8, "cpu", pinned=False)[0].endswith("needs 8")
    assert notes_on_machine(4, "cpu", pinned=True) == []
    assert notes_on_machine(1, "cpu", pinned=False) == []


def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert re.search(r"used 1\.3 of .*2 cores", notes_on_neighbours(1.26)[0])
    assert notes_on_neighbours(0.05) == []
    assert notes_on_neighbours(None) == []


def test_what_a_gpu_hides_is_noted() -> None:
    assert "a GPU's compiled program" in notes_on_machine(8, "gpu", pinned=False)[0]
