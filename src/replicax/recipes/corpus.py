"""Training text for recipes: find the files, skip what is not text, and hold some out."""

import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from replicax.errors import DataError
from replicax.recipes.text_columns import Document, is_table, read_column
from replicax.text.wording import counted


@dataclass(frozen=True)
class Corpus:
    """Non-empty documents, in an order that depends only on their names.

    `source` is a printable description of what was found, where, and what was skipped.
    """

    name: str
    source: str
    documents: tuple[Document, ...]
    noun: str = "file"
    """The name of a document."""


NOT_THE_LIBRARY = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
"""Folders of the standard library with third-party packages, or with tests and their data."""
BINARY_LOOKUP_BYTES = 8192
HELD_OUT_ONE_IN = 20


def read_corpus(path: Path | None = None, column: str = "text") -> Corpus:
    """Read the documents at `path`, or the source code of Python's standard library.

    A table has a document in each row of `column`: a .jsonl or .parquet file, or a folder that
    `datasets` saved. Any other file is one document, whatever it contains. In a folder, every file
    at any depth is a document or a table, ordered by relative path, except those that are skipped
    and counted in `source`: empty files, binary files (a NUL in the first 8 KiB), hidden files and
    folders (with a leading dot), symlinked folders, and anything that is not a regular file. The
    standard library's documents are its .py files, excluding tests and installed packages.

    Raises:
        DataError: `path` does not exist, a file or folder cannot be read, there is no text, or a
            table has no such column.
    """
    skipped: Counter[str] = Counter()
    try:
        if path is None:
            folder = Path(sysconfig.get_paths()["stdlib"])
            name = what = f"Python {platform.python_version()}'s standard library"
            where = f" in {folder}"
            files = _files(folder, skipped, suffix=".py", passed_over=NOT_THE_LIBRARY)
        else:
            name, what, where = path.resolve().name, str(path), ""
            if not path.exists():
                raise DataError(f"{path} does not exist; provide a file or folder of text")
            files = _files(path, skipped) if path.is_dir() and not is_table(path) else [path]
        documents = []
        for file in files:
            if is_table(file):
                documents += read_column(file, column)
            elif file == path:
                documents += [Document(str(path), path.read_bytes())]
            else:
                documents += _read(file, skipped)
    except OSError as error:
        _cannot_read(error)
    noun = "document" if any(map(is_table, files)) else "file"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()) if count)
    total = sum(len(document.content) for document in documents)
    source = f"{what}: {counted(len(documents), noun)}, {_size(total)}{where}"
    source += f"; skipped {counts}" if counts else ""
    if total == 0:
        raise DataError(f"no text in {source}; provide a file or folder of text")
    return Corpus(name, source, tuple(documents), noun)


def hold_out(corpus: Corpus) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Split into training and held-out documents; neither part, nor any document, is empty.

    With 20 or more documents, every 20th is held out. With fewer, the last 5 % of each document's
    bytes, starting at a UTF-8 character boundary: nothing from a document below 20 bytes, nor from
    one below 80 bytes whose last character exceeds the 5 %.

    Raises:
        DataError: no document is large enough to hold out 5 % of it.
    """
    documents = corpus.documents
    if len(documents) >= HELD_OUT_ONE_IN:
        last = HELD_OUT_ONE_IN - 1
        train = (d for i, d in enumerate(documents) if i % HELD_OUT_ONE_IN != last)
        return tuple(train), documents[last::HELD_OUT_ONE_IN]

    parts = [_cut(document) for document in documents]
    held_out = tuple(after for _, after in parts if after.content)
    if not held_out:
        raise DataError(
            f"{corpus.name} has {counted(len(documents), corpus.noun)} of at most "
            f"{_size(max(len(d.content) for d in documents))}; holding out 5 % of one without "
            f"splitting its last character takes {HELD_OUT_ONE_IN} of its bytes for each byte of "
            "that character; provide more text"
        )
    return tuple(before for before, _ in parts), held_out


def _cut(document: Document) -> tuple[Document, Document]:
    name, content, offset = document.name, document.content, document.offset
    cut = len(content) - len(content) // HELD_OUT_ONE_IN
    # A UTF-8 character has at most three continuation bytes.
    beyond = content[cut : cut + 3]
    cut += next((i for i, byte in enumerate(beyond) if byte & 0xC0 != 0x80), len(beyond))
    return Document(name, content[:cut], offset), Document(name, content[cut:], offset + cut)


def _files(
    folder: Path, skipped: Counter[str], suffix: str = "", passed_over: Container[str] = ()
) -> list[Path]:
    """Return the files below `folder`, except linked folders and folders named in `passed_over`."""
    paths = []
    for parent, folders, files in os.walk(folder, onerror=_cannot_read):
        for names in (folders, files):
            hidden = [name for name in names if name.startswith(".")]
            skipped["hidden"] += len(hidden)
            names[:] = [name for name in names if name not in hidden]
        folders[:] = [name for name in folders if name not in passed_over]
        skipped["linked folders"] += sum(Path(parent, name).is_symlink() for name in folders)
        paths += [Path(parent, name) for name in files if name.endswith(suffix)]

    regular = [path for path in paths if path.is_file()]
    skipped["not regular files"] += len(paths) - len(regular)
    return sorted(regular, key=lambda path: path.relative_to(folder).as_posix())


def _read(path: Path, skipped: Counter[str]) -> list[Document]:
    """Return the document in a file, if it is text."""
    with path.open("rb") as file:
        first = file.read(BINARY_LOOKUP_BYTES)
        content = b"" if b"\0" in first else first + file.read()
    if not content:
        skipped["binary" if first else "empty"] += 1
        return []
    return [Document(str(path), content)]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 100_000 else f"{size_bytes:,} bytes"


def _cannot_read(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}; make it readable, or move it away"
    ) from error
