"""A batch: one row dim, dtypes that a device holds, and padding that counts for nothing."""

import sys
import types
from collections import ChainMap, OrderedDict, UserDict
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from support.figures import refused

from replicax.core.data.rows import OpenedRows, opened
from replicax.errors import DataError


def on_host(data: Any, *, copy: bool = False) -> Any:
    return opened(data).on_host(copy=copy).data


def test_padding_repeats_rows_from_the_first_on_with_mask_zero() -> None:
    batch = OpenedRows({"x": np.array([10, 11, 12])}).padded(8, np.array([5, 6, 7]))
    assert batch.data["x"].tolist() == [10, 11, 12, 10, 11, 12, 10, 11]
    assert batch.mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert batch.index.tolist() == [5, 6, 7, 5, 6, 7, 5, 6]
    assert (batch.rows, batch.size) == (3, 8)
    assert (batch.mask.dtype, batch.index.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, ["['x']", "4", "['y']", "3"]),
        ({"x": {"a": np.zeros(4)}, "y": (np.zeros(7),)}, ["['x']['a']", "4", "['y'][0]", "7"]),
        ({"x": np.zeros(4), "rate": 0.5}, ["['rate']", "scalar"]),
        ({"x": np.zeros(4), "rate": np.float32(1)}, ["['rate']", "scalar"]),
        ({}, ["no array"]),
        (None, ["no array"]),
    ],
)
def test_leaves_without_one_row_dim_are_refused_by_name(data: Any, words: list[str]) -> None:
    with refused(DataError, *words):
        _ = opened(data).count


def test_host_rows_have_the_dtype_that_a_device_holds() -> None:
    given = ["float64", "int64", "uint64", "complex128", "float16", "bfloat16", "uint8", "bool"]
    held = ["float32", "int32", "uint32", "complex64", "float16", "bfloat16", "uint8", "bool"]
    assert [on_host(np.ones(3, each)).dtype for each in given] == held
    limits = [2**31 - 1, -(2**31)]
    assert on_host(np.array(limits)).tolist() == limits


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([0, 2**31 + 5, 2**40]), ["['x']", "int64", "2147483653", "int32", "2147483647"]),
        (np.array([-(2**31) - 1, 0]), ["['x']", "-2147483649", "-2147483648"]),
        (np.array([2**32], np.uint64), ["['x']", "uint64", "4294967296", "uint32"]),
    ],
)
def test_integers_that_do_not_fit_are_refused_with_their_range(
    array: np.ndarray, words: list[str]
) -> None:
    with refused(DataError, *words):
        on_host({"x": array})


@pytest.mark.parametrize(
    "array",
    [
        np.array(["cat", "dog"]),
        np.array([b"cat", b"dog"]),
        np.array([None, object()]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, "timedelta64[s]"),
        np.zeros(2, [("a", "f4")]),
    ],
    ids=["str", "bytes", "object", "datetime", "timedelta", "structured"],
)
def test_what_is_no_number_is_refused_by_name(array: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"\['label'\].*only numbers"):
        on_host({"label": array})


def test_float64_too_large_for_float32_is_refused_and_infinity_stays() -> None:
    with pytest.raises(DataError, match=r"\['x'\].*float64"):
        on_host({"x": np.array([1e300])})
    given = np.array([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(on_host(given), given.astype(np.float32))


class Tensor:
    """The part of a tensor of torch that is read here."""

    def __init__(self, array: np.ndarray, dtype: str, requires_grad: bool = False) -> None:
        self.array, self.dtype, self.requires_grad = array, f"torch.{dtype}", requires_grad
        self.shape = array.shape

    def detach(self) -> "Tensor":
        return Tensor(self.array, self.dtype.removeprefix("torch."))

    def cpu(self) -> "Tensor":
        return self

    def element_size(self) -> int:
        return self.array.dtype.itemsize

    def view(self, dtype: str) -> "Tensor":
        return Tensor(self.array.view(dtype), dtype)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        if self.requires_grad or "bfloat16" in self.dtype or "sparse" in self.dtype:
            raise RuntimeError("use detach,\nor another dtype")
        return self.array


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(Tensor=Tensor, int16="int16", uint8="uint8")
    monkeypatch.setitem(sys.modules, "torch", module)


@pytest.mark.promise("outside.batches-of-any-kind")
def test_a_tensor_of_torch_is_data_without_its_gradient(torch: None) -> None:
    x = np.arange(3, dtype=np.float32)
    assert on_host({"x": Tensor(x, "float32", requires_grad=True)})["x"] is x


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_that_numpy_lacks_keep_their_bits(torch: None, dtype: str) -> None:
    x = jnp.arange(3, dtype=dtype)
    found = on_host(Tensor(np.asarray(x), dtype), copy=True)
    assert (found.dtype, found.tolist()) == (x.dtype, x.tolist())


def test_what_numpy_cannot_read_is_refused_by_name(torch: None) -> None:
    with refused(DataError, "['x']"):
        on_host({"x": Tensor(np.ones(3), "sparse")})


class Lookup(UserDict[Any, Any]):
    pass


@pytest.mark.promise("outside.batches-of-any-kind")
@pytest.mark.parametrize("kind", [UserDict, ChainMap, MappingProxyType, OrderedDict])
def test_any_mapping_is_a_dict(kind: Any) -> None:
    given = kind({"x": np.zeros(3), "more": Lookup({"y": np.ones((3, 2))})})
    assert opened(given).count == 3
    assert on_host(given)["more"]["y"].shape == (3, 2)


def test_a_mapping_by_number_is_refused() -> None:
    with pytest.raises(DataError, match=r"Lookup\b.*\bkey 0\b"):
        opened(Lookup({0: np.zeros(3), 1: np.zeros(3)}))
    assert opened({0: np.zeros(3), 1: np.zeros(3)}).count == 3


def test_names_that_cannot_be_sorted_are_refused() -> None:
    with pytest.raises(DataError, match=r"'int' and 'str'"):
        opened({"x": np.zeros(3), 1: np.zeros(3)})


@pytest.mark.promise("outside.batches-of-any-kind")
def test_a_masked_array_is_refused_if_it_hides_a_value() -> None:
    values = np.arange(4, dtype=np.float32)
    plain = on_host(np.ma.masked_array(values, mask=[False] * 4), copy=True)
    assert type(plain) is np.ndarray
    assert plain.tolist() == values.tolist()
    with pytest.raises(DataError, match=r"\['x'\].* 1 of 4 "):
        on_host({"x": np.ma.masked_equal(values, 2)}, copy=True)


@pytest.mark.promise("outside.batches-of-any-kind")
@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">u2", ">c8", ">f2"])
def test_bytes_in_another_order_are_the_same_numbers(dtype: str) -> None:
    native = on_host(np.array([1, 200, 3], dtype))
    assert (native.dtype.isnative, native.tolist()) == (True, [1, 200, 3])


@pytest.mark.parametrize(
    "leaf",
    [np.ones(3, np.longdouble), np.ones(3, np.clongdouble), scipy.sparse.csr_array(np.eye(3))],
    ids=["longdouble", "clongdouble", "sparse"],
)
def test_arrays_that_no_device_holds_are_refused_by_name(leaf: Any) -> None:
    for copy in (True, False):
        with pytest.raises(DataError, match=r"\['x'\]"):
            on_host({"x": leaf}, copy=copy)


class Picky:
    """A class whose constructor checks its argument."""

    def __init__(self, x: Any) -> None:
        assert x.ndim == 2
        self.x = x


jax.tree_util.register_pytree_node(Picky, lambda own: ((own.x,), None), lambda _, own: Picky(*own))


def test_a_class_that_jax_cannot_make_is_no_batch() -> None:
    with pytest.raises(DataError, match="Picky"):
        opened(Picky(np.ones((3, 2))))
