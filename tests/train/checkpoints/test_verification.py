"""A damaged checkpoint is refused, whatever the damage."""

import contextlib
import hashlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.figures import assert_mentions
from support.saved_checkpoint import chunks, save, sealed, tree
from support.tiers import only

from replicax.errors import CheckpointError
from replicax.train.checkpoints.manifest import MANIFEST, ArrayEntry, FileEntry, read_manifest
from replicax.train.checkpoints.store import verify_checkpoint

CORRUPTIONS, MANY_CORRUPTIONS = 300, 2_500
KINDS = ("flip", "truncate", "delete", "swap", "extra")
DATA = "default/d"
SHA256_OF_NOTHING = hashlib.sha256(b"").hexdigest()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests copy."""
    folder = tmp_path_factory.mktemp("original") / "120"
    folder.mkdir()
    save(folder, tree())
    return folder


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(original, tmp_path / original.name))


def refusal(folder: Path) -> str:
    """Return the refusal, in one line."""
    with pytest.raises(CheckpointError) as refused:
        verify_checkpoint(folder, read_manifest(folder))
    reason = str(refused.value)
    assert reason.isprintable()
    return reason


def test_dtypes_of_eight_bytes(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        arrays = {name: jnp.ones((6, 2), name) for name in ("int64", "uint64", "float64")}
        arrays["complex128"] = jnp.ones(3, "complex128")
        save(tmp_path, arrays)
    verify_checkpoint(tmp_path, read_manifest(tmp_path))


def test_an_empty_array_has_no_files(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    arrays = {**manifest.arrays, "params.none": ArrayEntry("float32", (0, 4))}
    sealed(checkpoint, arrays=arrays)
    verify_checkpoint(checkpoint, read_manifest(checkpoint))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [(["0.0"], ["params.dense.kernel", "0 ", "1 "]), (["0.0", ".zarray"], ["kernel"])],
    ids=["no chunk", "no array"],
)
def test_a_checkpoint_that_was_never_whole_is_refused(
    checkpoint: Path, keys: list[str], reason: list[str]
) -> None:
    """The manifest matches the damage, and Orbax would read zeros."""
    for key in keys:
        del chunks(checkpoint)[f"params.dense.kernel/{key}"]
    sealed(checkpoint, arrays=read_manifest(checkpoint).arrays)
    assert_mentions(refusal(checkpoint), *reason)


@pytest.mark.parametrize("linked", ["default", DATA, "default/_METADATA", MANIFEST])
def test_a_link_is_refused_though_behind_it_is_what_was_there(
    checkpoint: Path, linked: str
) -> None:
    outside = (checkpoint / linked).rename(checkpoint.with_name("outside"))
    (checkpoint / linked).symlink_to(outside)
    assert_mentions(refusal(checkpoint), f"{linked} is", "regular file")


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "default/../../outside"])
def test_a_path_out_of_the_folder_is_refused(checkpoint: Path, path: str) -> None:
    (checkpoint.with_name("outside")).write_bytes(b"")
    files = {**read_manifest(checkpoint).files, path: FileEntry(0, (SHA256_OF_NOTHING,))}
    sealed(checkpoint, arrays=read_manifest(checkpoint).arrays, files=files)
    assert refusal(checkpoint) == f"{path} is missing"


# Random damage: to bits, whole files, and several at once.


@contextlib.contextmanager
def corrupted(folder: Path, whole: dict[str, bytes], seed: int) -> Iterator[str]:
    """Corrupt `folder` and yield how; undone unless an error is raised meanwhile."""
    choose = random.Random(seed)
    kind, path = choose.choice(KINDS), choose.choice(list(whole))
    file, text, what = folder / path, whole[path], f"seed {seed}: {kind} of {path}"
    if kind == "flip":
        position, bit = choose.randrange(len(text)), choose.randrange(8)
        put(file, position, bytes([text[position] ^ 1 << bit]))
        yield what
        put(file, position, text[position : position + 1])
    elif kind == "truncate":
        size = choose.randrange(len(text))
        os.truncate(file, size)
        yield what
        put(file, size, text[size:])
    elif kind == "delete":
        elsewhere = file.rename(folder.with_name("deleted"))
        yield what
        elsewhere.rename(file)
    elif kind == "extra":
        added = file.with_name(f"{file.name}{choose.randrange(9)}")
        added.write_bytes(text)
        yield what
        added.unlink()
    else:
        other = choose.choice([each for each in whole if whole[each] != text])
        swap(file, folder / other)
        yield f"{what} and {other}"
        swap(file, folder / other)


def put(file: Path, position: int, text: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        opened.write(text)


def swap(one: Path, other: Path) -> None:
    between = one.rename(one.with_name("between"))
    other.rename(one)
    between.rename(other)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file, by its path in `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def accepted(folder: Path, seeds: range) -> list[str]:
    """Return the corruptions that were not refused."""
    whole, found = contents(folder), []
    for seed in seeds:
        with corrupted(folder, whole, seed) as what, contextlib.suppress(CheckpointError):
            verify_checkpoint(folder, read_manifest(folder))
            found.append(what)
    verify_checkpoint(folder, read_manifest(folder))
    return found


@pytest.mark.promise("checkpoints.no-damage-passes")
def test_no_corruption_is_accepted(checkpoint: Path) -> None:
    assert accepted(checkpoint, range(CORRUPTIONS)) == []


@pytest.mark.parametrize("block", only((), range(1, 5), sampled=[1]))
def test_none_of_many_corruptions_is_accepted(checkpoint: Path, block: int) -> None:
    first = block * MANY_CORRUPTIONS
    assert accepted(checkpoint, range(first, first + MANY_CORRUPTIONS)) == []


def test_corruptions_are_of_every_kind_and_of_every_file(checkpoint: Path) -> None:
    whole = contents(checkpoint)
    kinds, touched = set(), set()
    for seed in range(CORRUPTIONS):
        with corrupted(checkpoint, whole, seed) as what:
            kinds.add(what.split()[2])
            paths = what.split(" of ", 1)[1].split(" and ")
            assert contents(checkpoint) != whole
        touched.update(paths)
    assert contents(checkpoint) == whole
    assert kinds == set(KINDS)
    assert touched == whole.keys()
    assert MANIFEST in touched
