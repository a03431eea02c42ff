"""Every token but the first is a target, once, and padding never is."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.errors import ConfigError, DataError
from replicax.recipes.text import pack

END = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, END), max_size=30), min_size=1, max_size=8)


def arrays(documents: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in documents]


@given(DOCUMENTS.filter(lambda documents: documents != [[]]), st.integers(1, 40))
def test_every_token_but_the_first_is_a_target_once_and_in_order(
    documents: list[list[int]], context: int
) -> None:
    rows = pack(iter(arrays(documents)), END, context, vocab_size=10)

    stream = list(itertools.chain.from_iterable([*ids, END] for ids in documents))
    tokens, length = rows["tokens"], rows["length"]
    assert tokens.shape == (len(length), context + 1)
    real = np.arange(context) < length[:, None]
    assert tokens[:, 1:][real].tolist() == stream[1:]
    # Each target's input is the token before it.
    assert tokens[:, :-1][real].tolist() == stream[:-1]
    assert (tokens[:, 1:][~real] == END).all()
    assert (length[:-1] == context).all()
    assert 1 <= length[-1] <= context


def test_dtypes_are_as_narrow_as_the_vocabulary_allows() -> None:
    for vocab_size, dtype in {2**16: np.uint16, 2**16 + 1: np.int32}.items():
        largest = vocab_size - 1
        rows = pack(arrays([[0, largest]]), largest, 2, vocab_size)
        assert rows["tokens"].dtype == dtype
        assert rows["tokens"].tolist() == [[0, largest, largest]]
        assert rows["length"].dtype == np.int32


def test_ids_beyond_the_vocabulary_do_not_wrap_around() -> None:
    for ids in ([10], [2**16], [-1]):
        with pytest.raises(AssertionError):
            pack(arrays([ids]), END, 2, vocab_size=10)


def test_nothing_to_predict_is_an_error() -> None:
    for documents, count in {(): 0, ((),): 1}.items():
        with pytest.raises(DataError) as caught:
            pack(arrays([list(ids) for ids in documents]), END, 2, vocab_size=10)
        assert re.match(rf"a text\b.* {count} tokens, .*nothing\b.* at least 2 ", str(caught.value))
    with pytest.raises(ConfigError, match=r"context 0 leaves nothing\b.*"):
        pack(arrays([[1, 2]]), END, 0, vocab_size=10)
