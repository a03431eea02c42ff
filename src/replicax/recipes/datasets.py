"""Data sets for recipes, found on this machine or downloaded, and verified."""

import gzip
import hashlib
import logging
import threading
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import DataError, MissingDependencyError, require
from replicax.text.cache_folder import cache_folder


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images and labels, in host memory and read-only.

    `train` and `test` each hold `image`, uint8 [rows, 28, 28, 1], and `label`, int32 [rows] in
    0..9. `source` is a printable description of their origin.
    """

    name: str
    source: str
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


@dataclass(frozen=True)
class IdxFile:
    """A published uint8 idx file: its shape and the SHA-256 of its bytes."""

    name: str
    shape: tuple[int, ...]
    sha256: str
    sha256_gz: str
    """Digest of the compressed file as published by its authors."""


IMAGE = jax.ShapeDtypeStruct((28, 28, 1), jnp.uint8)
"""The shape of an image."""
FASHION_MNIST = {
    ("train", "image"): IdxFile(
        "train-images-idx3-ubyte",
        (60000, 28, 28),
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    ("train", "label"): IdxFile(
        "train-labels-idx1-ubyte",
        (60000,),
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    ("test", "image"): IdxFile(
        "t10k-images-idx3-ubyte",
        (10000, 28, 28),
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    ("test", "label"): IdxFile(
        "t10k-labels-idx1-ubyte",
        (10000,),
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
}
DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
UPSTREAM = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
ANSWER_WITHIN_SECONDS = 4.0
DIGITS = Path(__file__).with_name("data") / "digits.npz"
"""`image`, uint8 [1797, 8, 8] in 0..16, and `label`, uint8 [1797]; their origin: `digits.txt`."""


class OnFashionMNIST:
    """The data of a recipe: Fashion-MNIST, from `data_dir` or wherever it is found."""

    data_dir: Path | None

    def train_source(self) -> dict[str, Any]:
        """Return `image` uint8 `[rows, 28, 28, 1]` and `label` int32 `[rows]`."""
        return self._data.train

    def eval_source(self) -> dict[str, Any]:
        """Return the test images."""
        return self._data.test

    def eval_data(self, path: Path) -> dict[str, Any]:
        """Return the test images in the folder `path`."""
        return fashion_mnist(path).test

    def data_description(self) -> str:
        """Describe the images and their location."""
        return f"{self._data.name}: {self._data.source}"

    @cached_property
    def _data(self) -> ImageDataset:
        return fashion_mnist(self.data_dir)


def fashion_mnist(data_dir: Path | None = None) -> ImageDataset:
    """Load Fashion-MNIST: 60,000 training and 10,000 test images in 10 classes.

    Reads only `data_dir` if given; otherwise Debian's package dataset-fashion-mnist, then the cache
    (`$REPLICAX_CACHE`, `$XDG_CACHE_HOME/replicax` or `~/.cache/replicax`), then a download into the
    cache. If all of these fail, returns the digits that come with Replicax, with `name` "digits"
    and a `source` that gives the reason.

    Raises:
        DataError: a file is missing from `data_dir` or differs from the published one.
    """
    if data_dir is not None:
        missing = [file.name for file in FASHION_MNIST.values() if _find(data_dir, file) is None]
        if missing:
            raise DataError(
                f"{data_dir / missing[0]}[.gz] is missing; that folder must contain "
                f"{', '.join(file.name for file in FASHION_MNIST.values())}, each plain or .gz"
            )
        return _read_fashion_mnist(data_dir, str(data_dir))

    cache = cache_folder() / "fashion-mnist"
    for folder, owner in ((DEBIAN_DIR, "Debian's dataset-fashion-mnist"), (cache, "the cache")):
        if all(_find(folder, file) for file in FASHION_MNIST.values()):
            return _read_fashion_mnist(folder, f"{owner} in {folder}")
    try:
        _download(cache)
    # Without pooch, network or disk space, or with a wrong checksum: fall back to other data, whose
    # `source` gives the reason.
    except (MissingDependencyError, OSError, ValueError) as error:
        return _digits(
            f"Fashion-MNIST is neither in {DEBIAN_DIR} nor in {cache}, and the download failed "
            f"({_in_one_line(error)})"
        )
    return _read_fashion_mnist(cache, f"downloaded from {UPSTREAM} to {cache}")


def _find(folder: Path, file: IdxFile) -> Path | None:
    candidates = (folder / file.name, folder / f"{file.name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _read_fashion_mnist(folder: Path, source: str) -> ImageDataset:
    splits: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    for (split, field), file in FASHION_MNIST.items():
        path = _find(folder, file)
        assert path is not None, "checked by the caller"
        array = _read_idx(path, file)
        splits[split][field] = array[..., None] if field == "image" else array.astype(np.int32)
    return _dataset("fashion-mnist", source, **splits)


def _read_idx(path: Path, file: IdxFile) -> np.ndarray:
    """Read the uint8 array in `path`, after verifying the checksum of `file`."""
    expected, actual = "a readable file", ""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        expected, actual = f"SHA-256 {file.sha256}", hashlib.sha256(content).hexdigest()
    except (OSError, EOFError, zlib.error) as error:
        actual = _in_one_line(error)
    if actual != file.sha256:
        raise DataError(
            f"{path} is corrupt: expected {expected}, found {actual}; delete it and run again"
        )
    header_bytes = 4 * (1 + len(file.shape))  # a magic number, and the dims
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(file.shape)


def _download(folder: Path) -> None:
    """Download the files missing from `folder`, each complete and verified, or raise."""
    pooch = require("pooch", "data")
    pooch.get_logger().setLevel(logging.WARNING)
    _await_answer(UPSTREAM, ANSWER_WITHIN_SECONDS)
    for file in FASHION_MNIST.values():
        pooch.retrieve(
            f"{UPSTREAM}{file.name}.gz",
            known_hash=f"sha256:{file.sha256_gz}",
            fname=f"{file.name}.gz",
            path=folder,
            downloader=pooch.HTTPDownloader(timeout=ANSWER_WITHIN_SECONDS),
        )


def _await_answer(url: str, seconds: float) -> None:
    """Raise unless `url` responds, with any status, within `seconds`.

    Uses a thread, because the timeout of a request applies to each address of a host separately
    and not to name resolution: behind a silent firewall these add up to minutes.
    """
    requests = require("requests", "data")
    outcome = f"timeout after {seconds:g} s"

    def ask() -> None:
        nonlocal outcome
        try:
            requests.head(url, timeout=seconds)
            outcome = ""
        except Exception as error:  # exceptions in a thread are lost
            outcome = type(error).__name__

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome:
        raise OSError(f"no response from {urlsplit(url).hostname}: {outcome}")


def _digits(why: str) -> ImageDataset:
    """Load the 1,797 handwritten digits, the last 297 for testing, resized to 28x28."""
    with np.load(DIGITS) as file:
        image, label = file["image"], file["label"].astype(np.int32)
    image = np.rint(_resize(image * (255 / 16), 28)).astype(np.uint8)[..., None]
    return _dataset(
        "digits",
        f"{why}; using handwritten digits instead, 1,797 images of 8x8 resized to 28x28",
        train={"image": image[:1500], "label": label[:1500]},
        test={"image": image[1500:], "label": label[1500:]},
    )


def _resize(images: np.ndarray, size: int) -> np.ndarray:
    """Resize [rows, s, s] to [rows, size, size], bilinear between pixel centres."""
    old = images.shape[-1]
    centre = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
    weight = np.maximum(0, 1 - np.abs(centre[:, None] - np.arange(old)))  # [size, old]
    resized: np.ndarray = weight @ images @ weight.T
    return resized


def _dataset(
    name: str, source: str, train: dict[str, np.ndarray], test: dict[str, np.ndarray]
) -> ImageDataset:
    for array in (*train.values(), *test.values()):
        array.flags.writeable = False
    return ImageDataset(name, source, train, test)


def _in_one_line(error: Exception) -> str:
    """Return the error's message in one shortened line, or its type if it has no message."""
    return " ".join(str(error).split())[:160] or type(error).__name__
