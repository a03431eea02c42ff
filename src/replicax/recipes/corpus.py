"""The text that recipes train on: which files were found, what was skipped, what is held out."""

import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from replicax.errors import DataError


@dataclass(frozen=True)
class Document:
    """The bytes of a file, or of a part of it that begins at its byte `offset`."""

    name: str
    content: bytes
    offset: int = 0


@dataclass(frozen=True)
class Corpus:
    """Documents, none of them empty, in an order that depends on their names alone.

    `source` says in words what was found, where, and what was skipped, for printing.
    """

    name: str
    source: str
    documents: tuple[Document, ...]


NOT_THE_LIBRARY = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
"""Folders of the standard library that hold other people's packages, or tests and their data."""
BINARY_LOOKUP_BYTES = 8192
HELD_OUT_ONE_IN = 20


def read_corpus(path: Path | None = None) -> Corpus:
    """The documents at `path`, or the sources of Python's own standard library.

    A file is one document, whatever it contains. Of a folder, every file at any depth is a
    document, in the order of the relative paths, but for those that `source` then counts: empty
    ones, binary ones (a NUL among the first 8 KiB), hidden files and folders (a dot comes first),
    linked folders, and what is no regular file. Of the standard library, the documents are its
    .py files, without the tests and without what has been installed beside it.

    Raises:
        DataError: nothing exists at `path`, a file or folder cannot be read, or there is no text.
    """
    skipped: Counter[str] = Counter()
    try:
        if path is None:
            folder = Path(sysconfig.get_paths()["stdlib"])
            name = what = f"Python {platform.python_version()}'s standard library"
            where = f" in {folder}"
            documents = _read(folder, skipped, suffix=".py", passed_over=NOT_THE_LIBRARY)
        else:
            name, what, where = path.resolve().name, str(path), ""
            if path.is_dir():
                documents = _read(path, skipped)
            elif path.exists():
                documents = [Document(str(path), path.read_bytes())]
            else:
                raise DataError(f"{path} does not exist; give a file or a folder of text")
    except OSError as error:
        _cannot_read(error)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()) if count)
    total = sum(len(document.content) for document in documents)
    source = f"{what}: {_files(documents)}, {_size(total)}{where}"
    source += f"; skipped {counts}" if counts else ""
    if total == 0:
        raise DataError(f"no text in {source}; give a file or a folder of text")
    return Corpus(name, source, tuple(documents))


def split(corpus: Corpus) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """The documents to train on, and those held out; neither is empty, nor is any document.

    Of 20 documents or more, every 20th is held out. Of fewer, the last 5 % of the bytes of each,
    from where the next character of UTF-8 begins: nothing of a document below 20 bytes, nor of one
    below 80 where its last character takes more than the 5 %.

    Raises:
        DataError: no document is large enough to hold out a twentieth of it.
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
            f"{corpus.name} has {_files(documents)} of at most "
            f"{_size(max(len(d.content) for d in documents))}; to hold out 5 % of a file, and its "
            f"last character whole, takes {HELD_OUT_ONE_IN} bytes of it for each byte of that "
            "character; give more text"
        )
    return tuple(before for before, _ in parts), held_out


def _cut(document: Document) -> tuple[Document, Document]:
    name, content, offset = document.name, document.content, document.offset
    cut = len(content) - len(content) // HELD_OUT_ONE_IN
    # A character has at most three bytes that continue it; after more, this is not UTF-8 anyway.
    beyond = content[cut : cut + 3]
    cut += next((i for i, byte in enumerate(beyond) if byte & 0xC0 != 0x80), len(beyond))
    return Document(name, content[:cut], offset), Document(name, content[cut:], offset + cut)


def _read(
    folder: Path, skipped: Counter[str], suffix: str = "", passed_over: Container[str] = ()
) -> list[Document]:
    """The files below `folder`, but for folders whose name is `passed_over`, and for links."""
    paths = []
    for parent, folders, files in os.walk(folder, onerror=_cannot_read):
        for names in (folders, files):
            hidden = [name for name in names if name.startswith(".")]
            skipped["hidden"] += len(hidden)
            names[:] = [name for name in names if name not in hidden]
        folders[:] = [name for name in folders if name not in passed_over]
        skipped["linked folders"] += sum(Path(parent, name).is_symlink() for name in folders)
        paths += [Path(parent, name) for name in files if name.endswith(suffix)]

    documents = []
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        if not path.is_file():
            skipped["not regular files"] += 1
            continue
        with path.open("rb") as file:
            first = file.read(BINARY_LOOKUP_BYTES)
            content = b"" if b"\0" in first else first + file.read()
        if content:
            documents.append(Document(str(path), content))
        else:
            skipped["binary" if first else "empty"] += 1
    return documents


def _files(documents: Sequence[Document]) -> str:
    count = len(documents)
    return f"{count:,} file{'' if count == 1 else 's'}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 100_000 else f"{size_bytes:,} bytes"


def _cannot_read(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be read: {error.strerror}; make it readable, or move it away"
    ) from error
