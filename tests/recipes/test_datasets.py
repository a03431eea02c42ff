"""Fashion-MNIST is found in the stated order, checked by its bytes, never replaced silently."""

import gzip
import hashlib
import re
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.figures import assert_mentions
from support.tiers import EXHAUSTIVE

from replicax.errors import DataError
from replicax.recipes import datasets
from replicax.recipes.datasets import DEBIAN_DIR, IdxFile, fashion_mnist
from replicax.text.cache_folder import cache_folder

TINY_SHAPES = {
    ("train", "image"): ("train-images-idx3-ubyte", (6, 28, 28)),
    ("train", "label"): ("train-labels-idx1-ubyte", (6,)),
    ("test", "image"): ("t10k-images-idx3-ubyte", (3, 28, 28)),
    ("test", "label"): ("t10k-labels-idx1-ubyte", (3,)),
}
TRAIN_IMAGES = "train-images-idx3-ubyte"


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}i", 0x0800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    """A tiny data set in place of the published one, on a machine that has none and no network."""
    rng = np.random.default_rng(0)
    contents, table = {}, {}
    for key, (name, shape) in TINY_SHAPES.items():
        content = idx(rng.integers(0, 10, shape, dtype=np.uint8))
        contents[name] = content
        table[key] = IdxFile(name, shape, hashlib.sha256(content).hexdigest(), "unused")
    monkeypatch.setattr(datasets, "FASHION_MNIST", table)
    monkeypatch.setattr(datasets, "DEBIAN_DIR", tmp_path / "debian")
    monkeypatch.setenv("REPLICAX_CACHE", str(tmp_path / "cache"))

    def no_network(folder: Path) -> None:
        raise OSError("the network is out of reach")

    monkeypatch.setattr(datasets, "_download", no_network)
    return contents


def write(folder: Path, contents: dict[str, bytes], *, compressed: bool = True) -> Path:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


@EXHAUSTIVE
@pytest.mark.skipif(
    not DEBIAN_DIR.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
def test_the_real_files_are_the_published_ones(tmp_path: Path) -> None:
    data = fashion_mnist()

    assert data.name == "fashion-mnist"
    assert data.source == f"Debian's dataset-fashion-mnist in {DEBIAN_DIR}"
    for split, rows in ((data.train, 60_000), (data.test, 10_000)):
        assert split["image"].shape == (rows, 28, 28, 1)
        assert split["image"].dtype == np.uint8
        assert split["label"].dtype == np.int32
        assert np.bincount(split["label"]).tolist() == [rows // 10] * 10
        assert not split["image"].flags.writeable
        assert not split["label"].flags.writeable


@pytest.mark.parametrize("compressed", [True, False], ids=["gzipped", "plain"])
def test_files_are_read_gzipped_or_not(
    contents: dict[str, bytes], tmp_path: Path, compressed: bool
) -> None:
    data = fashion_mnist(write(tmp_path / "mine", contents, compressed=compressed))

    expected = np.frombuffer(contents[TRAIN_IMAGES][16:], np.uint8).reshape(6, 28, 28, 1)
    np.testing.assert_array_equal(data.train["image"], expected)
    assert data.test["label"].tolist() == list(contents["t10k-labels-idx1-ubyte"][8:])
    assert data.source == str(tmp_path / "mine")


def test_the_lookup_order(
    contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "fashion-mnist"

    monkeypatch.setattr(datasets, "_download", lambda folder: write(folder, contents))
    data = fashion_mnist()
    assert data.source == f"downloaded from {datasets.UPSTREAM} to {cache}"

    def second_download(folder: Path) -> None:
        pytest.fail("downloaded again")

    monkeypatch.setattr(datasets, "_download", second_download)
    assert re.fullmatch(rf"the cache\b.* {cache}", fashion_mnist().source)

    debian = write(tmp_path / "debian", contents)
    assert fashion_mnist().source == f"Debian's dataset-fashion-mnist in {debian}"

    assert fashion_mnist(write(tmp_path / "mine", contents)).source == str(tmp_path / "mine")


def test_an_incomplete_folder_is_passed_over(contents: dict[str, bytes], tmp_path: Path) -> None:
    (write(tmp_path / "debian", contents) / f"{TRAIN_IMAGES}.gz").unlink()
    write(tmp_path / "cache" / "fashion-mnist", contents)

    assert re.match(rf"the cache\b.* {tmp_path}/cache", fashion_mnist().source)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"REPLICAX_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/xdg/replicax"),
        ({"HOME": "/home/me"}, "/home/me/.cache/replicax"),
        ({"REPLICAX_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/replicax"),
    ],
)
def test_the_cache_folder(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPLICAX_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_folder() == Path(expected)


def test_a_file_missing_from_data_dir_is_an_error(
    contents: dict[str, bytes], tmp_path: Path
) -> None:
    write(tmp_path / "debian", contents)
    mine = write(tmp_path / "mine", contents)
    (mine / "t10k-labels-idx1-ubyte.gz").unlink()

    with pytest.raises(DataError) as caught:
        fashion_mnist(mine)

    files = (TRAIN_IMAGES, "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte")
    assert_mentions(str(caught.value), f"{mine}/t10k-labels-idx1-ubyte[.gz] is missing; ", *files)


CORRUPTIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated gzip": (
        lambda content: gzip.compress(content)[:-20],
        "expected a readable file, found Compressed file ended before",
    ),
    "not gzip": (
        lambda content: b"<html>not found</html>",
        "expected a readable file, found Not a gzipped file",
    ),
    "damaged gzip": (
        lambda content: gzip.compress(content)[:10] + b"\xff" * 40,
        "expected a readable file, found Error -3 while decompressing data",
    ),
    "too short": (lambda content: gzip.compress(content[:-1]), "expected SHA-256 "),
    "one flipped bit": (
        lambda content: gzip.compress(content[:-1] + bytes([content[-1] ^ 1])),
        "expected SHA-256 ",
    ),
}


@pytest.mark.parametrize(("corrupt", "words"), CORRUPTIONS.values(), ids=CORRUPTIONS)
@pytest.mark.parametrize("place", ["mine", "debian", "cache/fashion-mnist"])
def test_a_corrupt_file_is_an_error_wherever_it_is(
    contents: dict[str, bytes],
    tmp_path: Path,
    place: str,
    corrupt: Callable[[bytes], bytes],
    words: str,
) -> None:
    folder = write(tmp_path / place, contents)
    path = folder / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(corrupt(contents[TRAIN_IMAGES]))

    with pytest.raises(DataError) as caught:
        fashion_mnist(folder if place == "mine" else None)

    message = str(caught.value)
    assert message.startswith(f"{path} is corrupt: {words}")
    assert message.endswith("run again")
    assert "\n" not in message


def test_digits_stand_in_where_nothing_else_can_be_had(
    contents: dict[str, bytes], tmp_path: Path
) -> None:
    data = fashion_mnist()

    assert data.name == "digits"
    places = (f"{tmp_path}/debian", f"{tmp_path}/cache/fashion-mnist")
    assert_mentions(
        data.source, *places, "download failed (", "digits", "1,797 images of 8x8", "28x28"
    )
    assert data.train["image"].shape == (1500, 28, 28, 1)
    assert data.test["image"].shape == (297, 28, 28, 1)
    assert data.train["image"].dtype == np.uint8
    assert data.train["image"].max() > 230
    assert np.unique(data.test["label"]).tolist() == list(range(10))


def test_resizing_is_bilinear() -> None:
    ramp = np.broadcast_to(np.arange(8.0), (1, 8, 8))

    resized = datasets._resize(ramp, 28)

    centre = (np.arange(28) + 0.5) * 8 / 28 - 0.5
    expected = np.broadcast_to(np.clip(centre, 0, 7), (1, 28, 28))
    np.testing.assert_allclose(resized, expected, atol=1e-12)
    np.testing.assert_allclose(datasets._resize(ramp.mT, 28), expected.mT, atol=1e-12)
    np.testing.assert_array_equal(datasets._resize(ramp, 8), ramp)


def test_the_digits_are_those_of_scikit_learn() -> None:
    with np.load(datasets.DIGITS) as file:
        image, label = file["image"], file["label"]
    bits = hashlib.sha256(image.tobytes() + label.tobytes()).hexdigest()
    assert bits == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_without_pooch_the_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "DEBIAN_DIR", Path("/nowhere"))
    monkeypatch.setenv("REPLICAX_CACHE", "/nowhere")
    monkeypatch.setitem(sys.modules, "pooch", None)

    data = fashion_mnist()

    assert data.name == "digits"
    assert re.search(r"pooch is .*installed", data.source)


def test_the_download_asks_for_each_file_and_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path, downloader: object) -> None:
        asked.append((url, known_hash, path / fname))

    monkeypatch.setattr("pooch.retrieve", retrieve)
    monkeypatch.setattr("requests.head", lambda url, timeout: None)

    datasets._download(tmp_path)

    assert asked == [
        (
            f"{datasets.UPSTREAM}{file.name}.gz",
            f"sha256:{file.sha256_gz}",
            tmp_path / f"{file.name}.gz",
        )
        for file in datasets.FASHION_MNIST.values()
    ]


@pytest.mark.parametrize(
    ("refuses", "seconds", "why"),
    [(False, 0.1, r"timeout .*0\.1 s"), (True, 10.0, "ConnectionRefusedError")],
)
def test_a_network_that_is_silent_or_refuses_is_given_up(
    refuses: bool, seconds: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = threading.Event()

    def head(url: str, timeout: float) -> None:
        if refuses:
            raise ConnectionRefusedError
        given_up.wait(10)

    monkeypatch.setattr("requests.head", head)
    with pytest.raises(OSError, match=rf"no response .*example\.org: {why}"):
        datasets._await_answer("https://example.org/data/", seconds)
    given_up.set()
