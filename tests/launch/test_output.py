"""Output of the processes: in whole lines, with their numbers, and in files."""

import errno
import os
import resource
import sys
import types
from pathlib import Path

import pytest
from launch.launching import launcher, python, run
from support.waiting import HANG_SECONDS

from replicax.launch import echo


def shown(
    script: str, folder: Path, capfdbinary: pytest.CaptureFixture[bytes], processes: int = 1
) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of processes that run `script` on the launcher's stdout and stderr."""
    outcome = run(python(script), processes, folder, quiet=False)
    assert outcome.exit_code == 0
    out, err = capfdbinary.readouterr()
    started, logs, *lines = out.splitlines(keepends=True)
    assert started.startswith(b"launch %d process" % processes)
    assert logs == f"logs   {folder}/\n".encode()
    return lines, err.splitlines(keepends=True)


def raw(folder: Path, process: int = 0) -> bytes:
    return (folder / f"process-{process}.log").read_bytes()


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"no end", [b"no end"]),
        (b"\n\nthree\n", [b"", b"", b"three"]),
        (b"\xff\xfe not UTF-8\n", [b"\xff\xfe not UTF-8"]),
        (b"of Windows\r\n", [b"of Windows"]),
        (b"\r 10%\r 50%\r100%\n", [b"100%"]),
        (b"\r 10%\r 50%", [b" 50%"]),
        (b"50%\r", [b"50%"]),
    ],
)
def test_what_is_shown_of_what_is_written(
    written: bytes, lines: list[bytes], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out, err = shown(f"os.write(1, {written!r})", tmp_path, capfdbinary)
    assert out == [b"[0] " + line + b"\n" for line in lines]
    assert not err
    assert raw(tmp_path) == written


def test_chatter_of_libraries_is_in_the_log_only(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    told = [
        b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of peers: 1",
        b"I0000 00:00:1764380000.123456    4242 coordination_service.cc:123] ready",
        b"W0000 00:00:1764380000.123456    4242 computation_placer.cc:177] already registered",
        b"[Gloo] Rank 0 has lost rank 1",
    ]
    shown_on = echo.Echo(1, False)
    log = echo.Log(tmp_path / "log", shown_on)
    stream = echo.Output(0, shown_on, log, error=False)
    stream.feed(b"\n".join(told) + b"\n")
    stream.end()
    shown_on.close(lambda: False)
    log.close()
    assert capfdbinary.readouterr().out.splitlines() == [b"[0] " + line for line in told[2:]]
    assert (tmp_path / "log").read_bytes().splitlines() == told


def test_a_progress_bar_is_shown_once_a_second(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    shown_on = echo.Echo(1, False)
    log = echo.Log(tmp_path / "log", shown_on)
    with monkeypatch.context() as patch:
        patch.setattr(echo, "time", clock)
        stream = echo.Output(0, shown_on, log, error=False)
        for step in range(50):  # eight a second
            stream.feed(b"\rstep %d" % step)
            clock.now += 0.125
        stream.end()
    shown_on.close(lambda: False)
    log.close()
    lines = capfdbinary.readouterr().out.splitlines()
    assert lines == [b"[0] step %d" % step for step in (8, 17, 26, 35, 44, 49)]
    assert (tmp_path / "log").read_bytes().count(b"\r") == 50


def test_a_line_that_is_written_in_pieces_is_whole(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = """
        for _ in range(20):
            os.write(1, b"one ")
            os.write(2, b"three ")
            time.sleep(0.005)
            os.write(2, b"four\\n")
            os.write(1, b"two\\n")
    """
    out, err = shown(script, tmp_path, capfdbinary)
    assert out == [b"[0] one two\n"] * 20
    assert err == [b"[0] three four\n"] * 20
    assert set(raw(tmp_path).splitlines()) == {b"one two", b"three four"}


def test_much_of_it_is_fast_and_no_line_is_torn(tmp_path: Path) -> None:
    script = """
        for line in range(5000):
            print(f"{me} {line} {'x' * 90}", file=(sys.stdout, sys.stderr)[line % 2])
    """
    began = _processor_seconds()
    with launcher(tmp_path, 4, python(script)) as started:
        out, err = started.communicate(timeout=HANG_SECONDS)
    assert _processor_seconds() - began < 5
    for stream, first in ((out.splitlines()[2:], 0), (err.splitlines()[:-1], 1)):
        for process in range(4):
            mine = [line for line in stream if line.startswith(b"[%d] " % process)]
            wanted = [
                b"[%d] %d %d %b" % (process, process, n, b"x" * 90) for n in range(first, 5000, 2)
            ]
            assert mine == wanted
        assert len(stream) == 10000


def _processor_seconds() -> float:
    """Return the processor seconds of all children that have ended, whatever the load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_line_without_an_end_does_not_fill_the_memory(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out, _ = shown("for _ in range(50): os.write(1, b'x' * 100000)", tmp_path, capfdbinary)
    assert max(map(len, out)) < 2 * echo.MOST_LINE_BYTES
    assert sum(line.count(b"x") for line in out) == 5_000_000
    assert raw(tmp_path) == b"x" * 5_000_000


@pytest.mark.parametrize("no_color", [False, True])
def test_numbers_have_colors_on_a_terminal(
    no_color: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        run(python("print('out')"), 2, tmp_path, quiet=False)
        read = os.read(ours, 4096).splitlines()
    os.close(ours)
    numbers = [b"[0]", b"[1]"] if no_color else [b"\x1b[36m[0]\x1b[0m", b"\x1b[33m[1]\x1b[0m"]
    assert sorted(read[2:]) == sorted(number + b" out" for number in numbers)


def test_quiet_shows_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(python("print('out'); print('err', file=sys.stderr)"), 1, tmp_path)
    assert capfd.readouterr() == ("", "")
    assert b"out" in raw(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(path: Path, *arguments: object, **more: object) -> object:
        path = Path("/dev/full") if path.suffix == ".log" else path
        return opened(path, *arguments, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    outcome = run(python("print('one'); print('two')"), 1, tmp_path, quiet=False)
    assert outcome.exit_code == 0
    out, err = capfd.readouterr()
    assert out.endswith("[0] one\n[0] two\n")
    (line,) = err.splitlines()
    assert line.startswith(f"replicax: {tmp_path}/process-0.log: {os.strerror(errno.ENOSPC)}")
