"""Islands without faults, against one jax.distributed job of as many processes on the same cores.

GPT `nano` on one fixed batch, so that input is not measured. All processes of a comparison are
started once, compile, and stay; each round runs all contenders in random order. Nothing is pinned.
The global batch is the same for every number of processes, and for one process alone. Also counted:
bytes on the islands' sockets, beside the formula for them.

Goal: islands take at most 1.10 times the step of the job. Writes `results/islands.json`.
"""

import argparse
import contextlib
import json
import math
import os
import random
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from process_group import free_port, place
from timing import environment, ratios, save, spread

from replicax.bench.machine import Neighbours
from replicax.bench.numbers import around
from replicax.cluster import variables
from replicax.core.modes.exact.exact_mode import MICRO_SHARDS
from replicax.core.modes.exact.fixed_tree import THREADS_VARIABLE
from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.islands.messages import Frame
from replicax.net.secret import SECRET

COUNTS = 2, 3, 4
MODES = "jit", "exact"
PROGRAM = Path(__file__).with_name("islands_job.py")
KINDS = "islands", "job", "alone"
BAR = 1.10
TOLERANCE = 1e-3
"""Largest difference in the loss, in nats, between contenders of mode `jit`."""

Key = tuple[str, str]
"""Kind and mode."""


class Contender:
    """Processes of one kind that run steps on request."""

    def __init__(self, kind: str, mode: str, count: int, rows: int) -> None:
        self.name = f"{kind} of {count}, {mode}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the processes)
        command = [sys.executable, str(PROGRAM), mode, str(rows)]
        # Mode `exact` requires it on CPUs; other modes use the cores that there are.
        threads = {THREADS_VARIABLE: str(MICRO_SHARDS)} if mode == "exact" else {}
        inherited = {k: v for k, v in os.environ.items() if k != THREADS_VARIABLE}
        base = {**inherited, **threads, variables.JOB_ID: secrets.token_hex(8)}
        base[SECRET] = secrets.token_urlsafe()
        ports = [free_port() for _ in range(count)]
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)

        def own(number: int) -> dict[str, str]:
            if kind == "islands":
                return {**place(0, 1), ISLAND: str(number), ISLANDS: addresses}
            return {**place(number, count), variables.COORDINATOR: f"127.0.0.1:{ports[0]}"}

        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**base, **own(number)},
            )
            for number in range(count)
        ]

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Return the answers of all processes to a number of steps."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `answers` reports why it ended
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Return the next answer of every process; the first one comes before any step."""
        found = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self._errors.seek(0)
                raise SystemExit(f"{self.name} failed:\n{self._errors.read()[-3000:]}")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """Stop all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()


def blocks(first: int, end: int) -> int:
    """Return the number of maximal aligned subtrees, each a power of two, of parts in a row."""
    count = 0
    while first < end:
        size = 1 << ((end - first).bit_length() - 1)
        while first % size:
            size //= 2
        first, count = first + size, count + 1
    return count


def formula(islands: int, parts: int, shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the bytes that each island sends in a step, the headers included.

    Island `n` computes a span of the parts, and sends each other island the sums of the maximal
    subtrees in it: `blocks x bytes of the float32 sums + header`. The few scalars of a step, such
    as its loss, are left out.
    """
    sums = 4 * sum(math.prod(shape) for shape in shapes)
    sent = []
    for number in range(islands):
        span = parts * number // islands, parts * (number + 1) // islands
        count = blocks(*span)
        kinds = [("float32", shape) for shape in shapes] * count
        header = Frame(1, 100, [(0, 1)] * count, "null", "{}", False, [], kinds, 2**32 - 1)
        length = 4 + len(msgspec.json.encode(header))
        sent.append((islands - 1) * (count * sums + length))
    return sent


def main() -> None:
    args = arguments()
    neighbours, where = Neighbours(), environment()
    found: dict[str, Any] = {}
    for count in args.counts:
        found[str(count)] = measure(count, args)
        show(count, found[str(count)])
        where["other_processes_used_cores"] = neighbours.cores()
        if not args.dry:
            result = {"environment": where, "settings": vars(args), "bar": BAR, "counts": found}
            save("islands", result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS), help="(2 3 4)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--rows", type=int, default=48, help="of the global batch (48)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--steps", type=int, default=30, help="of each per round (30)")
    parser.add_argument("--dry", action="store_true", help="write no file")
    parser.add_argument("--quick", action="store_true", help="a dry trial: 24 rows, 3 rounds of 4")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.rounds, args.steps, args.dry = 24, 3, 4, True
    for count in [*args.counts, MICRO_SHARDS]:
        if args.rows % count:
            parser.error(f"--rows {args.rows} over {count} processes or parts; choose a multiple")
    return args


def contenders(count: int, modes: Sequence[str]) -> list[Key]:
    """Return what is compared: mode `exact` in a job needs a power of two."""
    return [
        (kind, mode)
        for mode in modes
        for kind in KINDS
        if (kind, mode) != ("job", "exact") or not count & (count - 1)
    ]


def measure(count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders on one number of processes, in rounds."""
    keys = contenders(count, args.modes)
    with contextlib.ExitStack() as stack:
        running, shapes = {}, []
        for kind, mode in keys:
            print(f"{count}: {kind} {mode} starts and compiles", flush=True)
            of = Contender(kind, mode, 1 if kind == "alone" else count, args.rows)
            stack.callback(of.close)
            running[kind, mode] = of
            shapes = of.answers()[0]["shapes"]
            of.run(2)
        rounds: dict[Key, list[list[dict[str, Any]]]] = {key: [] for key in keys}
        order = random.Random(0)
        for number in range(args.rounds):
            for key in order.sample(keys, len(keys)):
                rounds[key].append(running[key].run(args.steps))
            check_agreement(rounds)
            print(f"{count}: round {number + 1} of {args.rounds}", flush=True)
    return {
        mode: {kind: summary(rounds, (kind, mode), shapes) for kind, m in keys if m == mode}
        for mode in args.modes
    }


def check_agreement(rounds: dict[Key, list[list[dict[str, Any]]]]) -> None:
    """Stop if contenders differ: in a bit in mode `exact`, else in the loss of the first round.

    Later, rounding grows with each step on the fixed batch. The processes of one contender may
    never differ in a bit.
    """
    last = {key: each[-1] for key, each in rounds.items()}
    for key, answers in last.items():
        if len({answer["weights"] for answer in answers}) > 1:
            raise SystemExit(f"{key}: the processes have different weights: {answers}")
    exact = {kind: each[0]["weights"] for (kind, mode), each in last.items() if mode == "exact"}
    if len(set(exact.values())) > 1:
        raise SystemExit(f"mode exact has different bits: {exact}")
    losses = {key: each[0][0]["loss"] for key, each in rounds.items()}
    if max(losses.values()) - min(losses.values()) > TOLERANCE:
        raise SystemExit(f"losses differ by more than {TOLERANCE}: {losses}")


def summary(
    rounds: dict[Key, list[list[dict[str, Any]]]], key: Key, shapes: list[list[int]]
) -> dict[str, Any]:
    """Summarize one contender; each spread is the median and the quartiles."""
    kind, mode = key

    def ms(of: Key) -> list[float]:
        return [1000 * max(answer["seconds"] for answer in answers) for answers in rounds[of]]

    own = ms(key)
    processor = [1000 * sum(a["processor_seconds"] for a in answers) for answers in rounds[key]]
    row: dict[str, Any] = {
        "ms_per_step": spread(own),
        "ms_of_rounds": own,
        "processor_ms_per_step": spread(processor),
        "weights": rounds[key][-1][0]["weights"],
    }
    for other in KINDS:
        if other != kind and (other, mode) in rounds:
            row[f"over_{other}"] = spread(ratios(own, ms((other, mode))))
    if kind == "islands":
        sent, received = (
            [sum(a[way] for a in each) / len(each) for each in zip(*rounds[key], strict=True)]
            for way in ("sent", "received")
        )
        expected = formula(len(sent), MICRO_SHARDS, shapes)
        row["bytes_sent_per_step"], row["bytes_received_per_step"] = sent, received
        row["bytes_by_formula"] = expected
        row["sent_over_formula"] = [a / b for a, b in zip(sent, expected, strict=True)]
    return row


def show(count: int, found: dict[str, Any]) -> None:
    """Print one line per contender."""
    print(f"{count} processes; medians, and [quartiles] or ± half their distance")
    print(f"{'':<17}{'ms per step':>16}{'processor ms':>14}{'over the job':>23}{'over alone':>23}")
    for mode, kinds in found.items():
        for kind, row in kinds.items():
            over = "".join(
                f"{f'{middle:.3f} [{low:.3f}, {high:.3f}]':>23}" if middle else f"{'-':>23}"
                for middle, low, high in (
                    row.get("over_job", (0, 0, 0)),
                    row.get("over_alone", (0, 0, 0)),
                )
            )
            print(
                f"{f'{kind} {mode}':<17}{around(row['ms_of_rounds']):>16}"
                f"{row['processor_ms_per_step'][0]:>14.1f}{over}"
            )
        row = kinds["islands"]
        sent = ", ".join(
            f"{each:,.0f} ({over:.4f})"
            for each, over in zip(row["bytes_sent_per_step"], row["sent_over_formula"], strict=True)
        )
        print(f"  bytes sent per step by each island, and over the formula: {sent}")
        if "over_job" in row:
            middle = row["over_job"][0]
            print(f"  {mode}: {'meets' if middle <= BAR else 'MISSES'} {BAR:.2f} ({middle:.3f})")
    print(flush=True)


if __name__ == "__main__":
    main()
