"""Documents in a column of a table: .jsonl and .parquet files, and folders of `datasets`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicax.errors import DataError, require_package

_TABLES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Document:
    """The bytes of a file, or of a part of it starting at byte `offset`; or a row of a table."""

    name: str
    content: bytes
    offset: int = 0


def is_table(path: Path) -> bool:
    """Whether a path is of a table, by its name or its files."""
    return path.suffix in _TABLES or any(
        (path / name).is_file() for name in ("dataset_dict.json", "state.json")
    )


def read_column(path: Path, column: str) -> list[Document]:
    """Return the documents in a column of the table at `path`; empty ones are left out.

    Raises:
        DataError: it is no table, or has no such column of text.
        MissingDependencyError: pyarrow or datasets, which reads it, is not installed.
    """
    if path.is_dir():
        rows = _of_datasets(path, column)
    elif path.suffix == ".parquet":
        rows = _of_parquet(path, column)
    else:
        rows = _of_lines(path, column)
    documents = []
    for number, text in rows:
        if not isinstance(text, str):
            raise DataError(
                f"{path}:{number} has a {type(text).__name__} in the column {column!r}, which must "
                "be text; choose another with --column, or mend the row"
            )
        if text:
            documents.append(Document(f"{path}:{number}", text.encode()))
    return documents


def _of_lines(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number} is not JSON ({error}); mend the line") from error
            if not isinstance(row, dict) or column not in row:
                raise _no_column(f"{path}:{number}", column, row if isinstance(row, dict) else ())
            yield number, row[column]


def _of_parquet(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    parquet = require_package("pyarrow.parquet", f"reads {path}")
    with parquet.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            raise _no_column(str(path), column, file.schema_arrow.names)
        batches = file.iter_batches(columns=[column])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        yield from enumerate(texts, 1)


def _of_datasets(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    datasets = require_package("datasets", f"reads {path}")
    dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, dict):
        raise DataError(
            f"{path} has the splits {', '.join(dataset)}; one is read at a time: pass its folder, "
            f"such as {path / next(iter(dataset))}"
        )
    if column not in dataset.column_names:
        raise _no_column(str(path), column, dataset.column_names)
    yield from enumerate(dataset[column], 1)


def _no_column(where: str, column: str, names: Any) -> DataError:
    known = ", ".join(map(str, names)) or "none"
    return DataError(
        f"{where} has no column {column!r}; its columns are {known}: choose one with --column"
    )
