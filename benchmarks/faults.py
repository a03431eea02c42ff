"""Inject every kind of fault into a process of a job, many times.

Writes `results/faults.json` and the table in `docs/faults.md`. The outcomes are checked by the
rules in `tests/support/cluster_faults.py`, which the tests share.
"""

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from timing import environment, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.cluster_faults import FAULTS, PATIENCE, Trial, run_trial  # noqa: E402

PAGE = ROOT / "docs" / "faults.md"
FOUND = "## Found from outside"
"""The heading of the part of the page that is written by hand."""
AT_A_TIME = 2
CLEAR = "\r\x1b[K" if sys.stdout.isatty() else ""
"""Clears the progress line, if stdout is a terminal."""

INTRODUCTION = """\
# When a process goes wrong

Whatever happens to one process of a job, the others detect it, name the process and the cause, and
exit with a non-zero code. No process waits forever. If the others should go on instead, use
[islands](islands.md#what-happens-when). This page is written by

```
python benchmarks/faults.py --trials {trials}
```

which starts real jobs of 2 or 3 processes with one CPU device each, injects a fault into one of
them at a random step, and checks by fixed rules how the others end: the exit codes, the last line
on each survivor's stderr, the time it took, and that no process is left. `--faults kill,freeze`
selects faults; `tests/support/cluster_faults.py` contains the rules. If process 0 dies, JAX's
coordination service dies with it, and gRPC sometimes logs a line after the message: a trial then
counts as unexpected."""

SECONDS = """\
Seconds run from the fault until all others have exited. For a process that never joins, and for
rejected ones, they run from the start of the program; for processes that differ, from the exit of
the first to the exit of the last."""


def measured(fault: str, trials: int) -> list[Trial]:
    """Run all trials of one fault, and print a line for each unexpected outcome."""
    done = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for number, trial in enumerate(pool.map(lambda n: run_trial(fault, n), range(trials))):
            done.append(trial)
            for wrong in trial.wrong:
                print(
                    f"{CLEAR}{fault}, trial {number} (process {trial.victim}): {wrong}", flush=True
                )
            if CLEAR:
                print(f"{CLEAR}{fault}: {number + 1} of {trials}", end="", flush=True)
    return done


def summed(trials: list[Trial]) -> dict[str, Any]:
    """Summarize a fault's trials for the table."""
    seconds = [trial.seconds for trial in trials]
    shown = max(trials, key=lambda trial: (not trial.wrong, trial.processes))
    return {
        "trials": len(trials),
        "as_expected": sum(not trial.wrong for trial in trials),
        "seconds_median": round(statistics.median(seconds), 2),
        "seconds_worst": round(max(seconds), 2),
        "line": shown.line,
        "seconds": [round(each, 3) for each in seconds],
        "unexpected": [
            {"processes": t.processes, "process": t.victim, "step": t.step, "what": t.wrong}
            for t in trials
            if t.wrong
        ],
    }


def page(result: dict[str, Any]) -> str:
    """Return the Markdown page: the method, the table, and the messages."""
    faults, of = result["faults"], result["environment"]
    patience = " and ".join(f"`{name}={value}`" for name, value in result["patience"].items())
    lines = [
        *INTRODUCTION.format(trials=result["trials"]).splitlines(),
        "",
        f"Measured on {of['date']}: {of['cores']} cores of {of['processor']}, Python "
        f"{of['python']}, jax {of['jax']},",
        f"{AT_A_TIME} trials at a time, with {patience} (60 and 30 by default).",
        "",
        "| Fault | Expected outcome | As expected | Seconds, median | Worst |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {FAULTS[name].what} | {FAULTS[name].expected} | {fault['as_expected']} of "
        f"{fault['trials']} | {fault['seconds_median']:.2f} | {fault['seconds_worst']:.2f} |"
        for name, fault in faults.items()
    ]
    lines += [
        "",
        *SECONDS.splitlines(),
        "",
        "## Messages",
        "",
        "The last line on the stderr of a process that had to stop, or was rejected:",
        "",
    ]
    for name, fault in faults.items():
        if fault["line"]:
            lines += [f"{FAULTS[name].what}:", "", "```", fault["line"], "```", ""]
    _, heading, found = PAGE.read_text(encoding="utf-8").partition(FOUND)
    return "\n".join([*lines, f"{heading}{found}"]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="trials per fault (20)")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"subset of {','.join(FAULTS)}")
    parser.add_argument("--dry", action="store_true", help="write no files")
    options = parser.parse_args()
    chosen = options.faults.split(",")
    if unknown := [name for name in chosen if name not in FAULTS]:
        parser.error(f"no such fault: {', '.join(unknown)}; use {', '.join(FAULTS)}")
    result = {
        "environment": environment(),
        "patience": PATIENCE,
        "trials": options.trials,
        "faults": {},
    }
    for name in chosen:
        started = time.monotonic()
        fault = summed(measured(name, options.trials))
        result["faults"][name] = fault
        print(
            f"{CLEAR}{name:<14}{fault['as_expected']:>3} of {fault['trials']:<3} as expected, "
            f"ended after {fault['seconds_median']:5.2f} s, worst {fault['seconds_worst']:5.2f} s "
            f"({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        if not options.dry:
            save("faults", result)
            PAGE.write_text(page(result), encoding="utf-8")
    sys.exit(any(fault["unexpected"] for fault in result["faults"].values()))


if __name__ == "__main__":
    main()
