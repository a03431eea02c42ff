"""Text files: which are read, in which order, what is skipped, and what is held out."""

import errno
import os
import platform
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from support.figures import figures

from replicax.errors import DataError
from replicax.recipes import corpus
from replicax.recipes.corpus import Corpus, hold_out, read_corpus
from replicax.recipes.text_columns import Document


def write(folder: Path, **contents: bytes) -> Path:
    """Files below `folder`, named by keywords in which `__` is a slash."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def of(*contents: bytes) -> Corpus:
    documents = tuple(Document(str(i), content) for i, content in enumerate(contents))
    return Corpus("numbers", "a test", documents)


def test_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = write(tmp_path, zipfile=b"no suffix", json__test__test_json=b"a test")
    for name in ("b.py", "a/b.py", "a.py", "empty.py"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"" if name == "empty.py" else name.encode())
    for name in corpus.NOT_THE_LIBRARY:
        (tmp_path / "a" / name).mkdir()
        (tmp_path / "a" / name / "not.py").write_bytes(b"not the library")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})

    found = read_corpus(None)

    assert [d.name for d in found.documents] == [
        f"{library}/{n}" for n in ("a.py", "a/b.py", "b.py")
    ]
    assert found.name == f"Python {platform.python_version()}'s standard library"
    assert found.source == f"{found.name}: 3 files, 14 bytes in {library}; skipped 1 empty"


def test_a_file_is_one_document_whatever_it_contains(tmp_path: Path) -> None:
    write(tmp_path, file=b"\0\xff" * 75_000)

    found = read_corpus(tmp_path / "file")

    assert found.documents == (Document(f"{tmp_path}/file", b"\0\xff" * 75_000),)
    assert found.name == "file"
    assert found.source == f"{tmp_path}/file: 1 file, 0.1 MB"


def test_what_a_folder_has_besides_text_is_counted(tmp_path: Path) -> None:
    first = corpus.BINARY_LOOKUP_BYTES
    write(
        tmp_path,
        text=b"text",
        late_nul=b"a" * first + b"\0",
        nul=b"a" * (first - 1) + b"\0",
        empty=b"",
    )
    write(tmp_path / ".git", config=b"hidden", objects__x=b"hidden")
    (tmp_path / ".env").write_bytes(b"hidden")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")

    found = read_corpus(tmp_path)

    assert [Path(d.name).name for d in found.documents] == ["late_nul", "text"]
    start, _, skipped = found.source.partition(";")
    assert start == f"{tmp_path}: 2 files, 8,197 bytes"
    assert "\n" not in found.source
    assert re.fullmatch(r" skipped 1 binary, 1 empty, 2 hidden, 2 not regular .*", skipped)


def test_links_to_files_are_followed_and_links_to_folders_are_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", text=b"text", sub__text=b"text")
    elsewhere = write(tmp_path / "elsewhere", linked=b"linked")
    (folder / "file").symlink_to(elsewhere / "linked")
    (folder / "folder").symlink_to(elsewhere)
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "itself").symlink_to("itself")

    found = read_corpus(folder)

    names = [document.name for document in found.documents]
    assert names == [f"{folder}/{name}" for name in ("file", "sub/text", "text")]
    assert re.search(r"; skipped 2 linked folders, 1 not regular .*$", found.source)


def test_no_text_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, empty=b"", binary=b"\0")
    fix = "provide a file or folder of text"
    for path, message in {
        tmp_path
        / "nowhere": f"{tmp_path}/nowhere does not exist; provide a file or folder of text",
        tmp_path / "empty": (f"no text in {tmp_path}/empty: 1 file, 0 bytes; {fix}"),
        tmp_path: (f"no text in {tmp_path}: 0 files, 0 bytes; skipped 1 binary, 1 empty; {fix}"),
    }.items():
        with pytest.raises(DataError) as caught:
            read_corpus(path)
        assert str(caught.value) == message


@pytest.mark.parametrize("what", ["file", "folder/file", "folder"])
def test_what_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    write(tmp_path, file=b"text", folder__file=b"text")
    forbidden = tmp_path / what

    def refusing(function: Callable[..., object]) -> Callable[..., object]:
        def call(path: object, *args: object, **kwargs: object) -> object:
            if Path(str(path)) == forbidden:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **kwargs)

        return call

    # The tests may run as root, who may read everything.
    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))

    with pytest.raises(DataError) as caught:
        read_corpus(forbidden if what == "file" else tmp_path)

    assert re.match(f"{forbidden} .*read: {os.strerror(errno.EACCES)}; make", str(caught.value))
    assert "\n" not in str(caught.value)


def test_every_20th_of_20_documents_or_more_is_held_out() -> None:
    for count, expected in {20: [19], 39: [19], 40: [19, 39], 41: [19, 39]}.items():
        found = of(*(b"%d" % i for i in range(count)))
        train, held_out = hold_out(found)
        assert [int(d.content) for d in held_out] == expected
        assert [int(d.content) for d in train] == [i for i in range(count) if i not in expected]


def test_of_fewer_documents_the_last_twentieth_is_held_out() -> None:
    train, held_out = hold_out(of(b"a" * 19, b"b" * 20, bytes(range(100))))

    assert train == (
        Document("0", b"a" * 19),
        Document("1", b"b" * 19),
        Document("2", bytes(range(95))),
    )
    assert held_out == (Document("1", b"b", 19), Document("2", bytes(range(95, 100)), 95))


def test_a_cut_is_between_characters() -> None:
    train, held_out = hold_out(of(b"a" * 75 + "€bb".encode()))
    # The last 4 of 80 bytes begin inside the €.
    assert train == (Document("0", b"a" * 75 + "€".encode()),)
    assert held_out == (Document("0", b"bb", 78),)


def test_bytes_that_are_not_utf8_are_cut_too() -> None:
    train, held_out = hold_out(of(b"\x80" * 200))

    assert len(train[0].content) == 193
    assert len(held_out[0].content) == 7


def test_too_little_to_hold_any_out_is_an_error() -> None:
    with pytest.raises(DataError) as caught:
        hold_out(of(b"a" * 19, b"b"))

    assert str(caught.value).startswith("numbers ")
    assert figures(str(caught.value)) == ["2", "19", "5", "20"]
    assert str(caught.value).endswith(" more text")
