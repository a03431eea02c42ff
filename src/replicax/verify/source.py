"""`replicax verify --source FILE.py`: the classic errors of data-parallel code, by reading it.

The rules, and what each speaks of:

- no-reduction: parameters updated by a gradient of local rows
- reduced-twice: pmean or psum of what shard_map has summed already
- sum-for-mean: psum of gradients of a mean loss, never divided
- mean-of-means: a masked loss averaged per device, or per micro-batch
- accumulated-not-divided: micro-batches added up and never divided
- shared-key: one PRNG key for the different rows of all replicas
- local-batch-norm: BatchNorm with statistics that drift apart
- index-not-stacked: x[0] on an output of pmap with out_axes=None
- removed-api: what JAX no longer has
- remainder: a batch split by a reshape that only some sizes survive
- batch-not-sharded: jit over a mesh with the whole batch on every device
- fetched-every-step: the host waits for a metric after each step
- compiled-in-loop: a function compiled anew at each turn
- frozen-value: a value that a compiled function closes over, assigned again after it was read
- old-api, index-gathers: notes on what works and is no longer the way

`# replicax: ignore[RULE]` on the line, or alone above it, silences a rule there.
"""

import ast
import collections
import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError
from replicax.verify.rules.finding import ERROR, NOTE, WARNING, Finding, spot
from replicax.verify.rules.frozen import check_frozen
from replicax.verify.rules.machine import Machine
from replicax.verify.rules.names import Imports
from replicax.verify.rules.norms import check_norms
from replicax.verify.rules.removed import check_removed
from replicax.verify.rules.report import Report
from replicax.verify.rules.scope import JIT

_DEEP = "it nests deeper than can be followed: split it"
_LONG = "it takes too long to follow to its end, and the rest was not checked: split it"


@dataclasses.dataclass(frozen=True)
class Examination:
    """What reading one file has shown."""

    path: Path
    findings: list[Finding]
    """From the top of the file down."""
    parallel: int
    """How many functions are made parallel in it: by pmap, by shard_map, or by jit over a mesh."""
    complete: bool = True
    """Whether all of it was followed; a very long file is not."""

    @property
    def fails(self) -> bool:
        """Whether anything but notes was found."""
        return any(finding.severity != NOTE for finding in self.findings)


def check_source(path: Path) -> list[Finding]:
    """The findings in a Python file.

    Raises:
        ConfigError: no such file, or one that is not Python.
    """
    return examine(path).findings


def examine(path: Path) -> Examination:
    """Read a Python file and run every rule on it; nothing of it is executed or imported.

    Raises:
        ConfigError: no such file, or one that is not Python.
    """
    text = _text(path)
    try:
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        message = getattr(error, "msg", None) or str(error)
        raise ConfigError(
            f"--source {path} is not Python: {where}{message}; give a .py file that runs"
        ) from error
    report = Report(text.splitlines())
    imports = Imports(tree)
    try:
        machine = Machine(tree, imports, report)
        machine.run()
    except RecursionError as error:
        raise ConfigError(f"--source {path} cannot be read: {_DEEP}") from error
    check_removed(tree, imports, report)
    check_norms(machine, imports)
    check_frozen(tree, imports, report)
    _note_gathers(machine, report)
    mapped = [made for made in machine.parallels if made.kind != JIT]
    counted = machine.parallels if machine.file_has_mesh else mapped
    parallel = len({id(made.node) for made in counted})
    return Examination(path, report.findings(), parallel, complete=not machine.incomplete)


def findings_lines(examination: Examination, width: int = 80) -> list[str]:
    """The findings as text: place and rule, the line, a mark below it, the reason and the fix.

    Args:
        examination: what `examine` returned.
        width: columns that no line passes, but for the path where that alone is longer.
    """
    lines: list[str] = []
    digits = len(str(max((one.line for one in examination.findings), default=0)))
    for finding in examination.findings:
        lines += [*_finding_lines(finding, examination.path, digits, width), ""]
    return [*lines, *_wrapped(summary(examination), width, "", "")]


def summary(examination: Examination) -> str:
    """One sentence on the whole file."""
    found = _found(examination)
    return found if examination.complete else f"{found}; {_LONG}"


def to_json(examination: Examination) -> dict[str, Any]:
    """The same for programs; what JSON can hold."""
    return {
        "path": str(examination.path),
        "parallel_functions": examination.parallel,
        "complete": examination.complete,
        "fails": examination.fails,
        "summary": summary(examination),
        "findings": [dataclasses.asdict(finding) for finding in examination.findings],
    }


def _found(examination: Examination) -> str:
    path = examination.path
    counts = collections.Counter(finding.severity for finding in examination.findings)
    if examination.complete and not examination.findings and not examination.parallel:
        return f"nothing to check: no pmap, shard_map or jit over a mesh in {path}"
    if not examination.findings:
        functions = _counted(examination.parallel, "parallel function")
        return f"no error found in {functions} of {path}"
    kinds = [_counted(counts[kind], kind) for kind in (ERROR, WARNING, NOTE) if counts[kind]]
    return f"{', '.join(kinds)} in {path}"


def _text(path: Path) -> str:
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"--source {path} is a notebook; write its cells to a file: "
            f"jupyter nbconvert --to script {path.name}"
        )
    if path.is_dir():
        raise ConfigError(f"--source {path} is a folder; give one .py file of it")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"--source {path}: no such file; give the path of a .py file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--source {path} is not text; give a .py file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"--source {path} cannot be read ({error.strerror}); check it") from error


def _note_gathers(machine: Machine, report: Report) -> None:
    """One note for all places of a file that take the first replica's copy by index."""
    if not machine.gathered:
        return
    nodes = sorted(machine.gathered, key=lambda node: spot(node))
    others = sorted({spot(node).line for node in nodes} - {spot(nodes[0]).line})
    shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    also = f" (also on line {shown})" if others else ""
    report.add(
        "index-gathers",
        spot(nodes[0]),
        "[0] of the replicas' axis compiles a gather in today's JAX, and with several processes "
        f"it fails{also}",
        "x.addressable_shards[0].data, flax.jax_utils.unreplicate(x), or out_axes=None for what "
        "is equal on all",
        NOTE,
    )


def _finding_lines(finding: Finding, path: Path, digits: int, width: int) -> list[str]:
    margin = " " * digits
    head = f"{finding.severity}[{finding.rule}]"
    code = finding.code.rstrip().replace("\t", " ")
    indent = len(code) - len(code.lstrip())
    room = width - digits - 4
    start = finding.column - 1 - indent
    code = code[indent:]
    # A long line is cut on the left where its marked part would not be seen.
    if start > room - 12:
        cut = start - room // 3
        code, start = "..." + code[cut + 3 :], start - cut
    marked = max(1, min(finding.width, len(code) - start, room - start))
    if len(code) > room:
        code = code[: room - 3] + "..."
    return [
        head,
        *_wrapped(
            f"{path}:{finding.line}:{finding.column}", width, f"{margin}--> ", f"{margin}    "
        ),
        f"{finding.line:>{digits}} | {code}",
        f"{margin} | {' ' * start}{'^' * marked}",
        *_wrapped(finding.reason, width, f"{margin} = why: ", f"{margin}        "),
        *_wrapped(finding.fix, width, f"{margin} = fix: ", f"{margin}        "),
    ]


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
