"""Rows of text from files or from a hub, unparsed and in a fixed order.

In: `data.path`: a JSON-lines file (`.jsonl`, `.json`, `.ndjson`), a parquet file, a glob or
a directory of such files, or the name of a data set on the hub. Out:

    open_sources -> [Source]     what there is to read
    raw_rows     -> RawRow       source, row number, and a line of bytes, a dict from arrow, or the
                                 reason why the row is unreadable; `conversation` takes it from here
    content_hash -> str          of everything that can be read

Invariants: a bad row never ends the reading, it becomes a `Rejected`; the order and the numbers of
rows depend on the source alone, so a row can be named in messages (`place`) at any later time.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_ddp.data.conversation import Rejected

if TYPE_CHECKING:
    import datasets

LINE_SUFFIXES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (*LINE_SUFFIXES, ".parquet")
COLUMNS = ("messages", "conversations", "tools")

_SLICE_ROWS = 256
_HASH_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


class Kind(Enum):
    """How the rows of a source are stored, and so how a row is named in messages."""

    LINES = "lines"
    PARQUET = "parquet"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one split on the hub.

    Attributes:
        name: path or hub name, for messages.
        kind: how it is stored.
        dataset: the loaded split, for `Kind.HUB` only.
    """

    name: str
    kind: Kind
    dataset: "datasets.Dataset | None" = None


class RawRow(NamedTuple):
    """An unparsed row: number of its source, its own number, and a line, a dict or a refusal."""

    source: int
    row: int
    raw: bytes | dict[str, Any] | Rejected


def place(name: str, kind: Kind, row: int) -> str:
    """The name of a row in messages: `file:line` (from 1) or `name[row]` (from 0)."""
    return f"{name}:{row}" if kind is Kind.LINES else f"{name}[{row}]"


def open_sources(path: str, *, split: str = "train", revision: str | None = None) -> list[Source]:
    """What `data.path` means, as files in sorted order or one split of a hub data set.

    Raises:
        ValueError: nothing there, no file of a known kind, or the hub refused.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        files = sorted(file for file in local.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise ValueError(f"data.path={path}: the directory has no file ending in {SUFFIXES}")
    elif local.is_file():
        files = [local]
    elif any(sign in path for sign in "*?["):
        # Path.glob refuses absolute patterns, so it starts from the root.
        absolute = local.absolute()
        found = Path(absolute.anchor).glob(str(absolute.relative_to(absolute.anchor)))
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise ValueError(f"data.path={path}: no file matches this pattern")
    elif path.startswith((".", "/", "~")) or local.suffix in SUFFIXES or path.count("/") > 1:
        raise ValueError(f"data.path={path}: no such file or directory")
    else:
        return [_open_hub(path, split=split, revision=revision)]
    return [_open_file(file) for file in files]


def content_hash(sources: list[Source]) -> str:
    """Hash of all that can be read: every byte of the files, or the hub's own fingerprint."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        digest.update(f"|{source.kind.value}|".encode())
        if source.dataset is not None:
            # The fingerprint covers revision, files and split. It has no public name in `datasets`.
            digest.update(source.dataset._fingerprint.encode())
            continue
        digest.update(f"{Path(source.name).stat().st_size}|".encode())
        with Path(source.name).open("rb") as file:
            while block := file.read(_HASH_BYTES):
                digest.update(block)
    return digest.hexdigest()


def raw_rows(sources: list[Source]) -> Iterator[RawRow]:
    """Every row of every source in order. Blank lines are passed over, but they count as lines.

    Raises:
        ValueError: a whole file cannot be read as what its name says.
    """
    for number, source in enumerate(sources):
        if source.kind is Kind.LINES:
            rows: Iterator[tuple[int, bytes | dict[str, Any] | Rejected]] = _lines(source)
        elif source.dataset is None:
            rows = _parquet_rows(source)
        else:
            rows = _hub_rows(source.dataset)
        for row, raw in rows:
            yield RawRow(number, row, raw)


def _open_file(file: Path) -> Source:
    if file.suffix in LINE_SUFFIXES:
        with file.open("rb") as stream:
            head = stream.read(64).removeprefix(_BOM).lstrip()
        if head.startswith(b"[") and file.suffix == ".json":
            raise ValueError(
                f"data.path: {file} is one JSON array; one row a line is needed "
                f"(`jq -c '.[]' {file.name} > {file.stem}.jsonl`)"
            )
        return Source(str(file), Kind.LINES)
    if file.suffix == ".parquet":
        return Source(str(file), Kind.PARQUET)
    raise ValueError(f"data.path: {file} does not end in one of {SUFFIXES}")


def _open_hub(path: str, *, split: str, revision: str | None) -> Source:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data.path={path} is no local file; to read it from the hub: pip install datasets"
        ) from error
    try:
        dataset = datasets.load_dataset(path, split=split, revision=revision)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.path={path} is no local file, and the hub did not give it with "
            f"data.split={split}, data.revision={revision}: {error or type(error).__name__}"
        ) from error
    wanted = _wanted_columns(path, dataset.column_names)
    return Source(f"{path}:{split}", Kind.HUB, dataset.select_columns(wanted))


def _wanted_columns(name: str, columns: list[str]) -> list[str]:
    wanted = [column for column in COLUMNS if column in columns]
    if not set(wanted) - {"tools"}:
        raise ValueError(
            f"data.path: {name} has no column 'messages' or 'conversations'; found: {columns}"
        )
    return wanted


def _lines(source: Source) -> Iterator[tuple[int, bytes]]:
    with Path(source.name).open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                yield number, text


def _parquet_rows(source: Source) -> Iterator[tuple[int, dict[str, Any] | Rejected]]:
    # Imported here: pyarrow is not needed for JSON lines.
    import pyarrow
    import pyarrow.parquet

    first = 0
    try:
        with pyarrow.parquet.ParquetFile(source.name) as file:
            columns = _wanted_columns(source.name, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_SLICE_ROWS, columns=columns):

                def read(start: int, stop: int, batch: Any = batch) -> list[dict[str, Any]]:
                    return batch[start:stop].to_pylist()

                for row, raw in _readable(len(batch), read):
                    yield first + row, raw
                first += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data.path: {source.name} after row {first}: {error}") from error


def _hub_rows(dataset: "datasets.Dataset") -> Iterator[tuple[int, dict[str, Any] | Rejected]]:
    def read(first: int, stop: int) -> list[dict[str, Any]]:
        columns = dataset[first:stop]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    return _readable(len(dataset), read)


def _readable(
    num_rows: int, read: Callable[[int, int], list[dict[str, Any]]]
) -> Iterator[tuple[int, dict[str, Any] | Rejected]]:
    """Rows of an arrow table by slices; a slice with undecodable text is read again row by row."""
    for first in range(0, num_rows, _SLICE_ROWS):
        stop = min(first + _SLICE_ROWS, num_rows)
        rows: list[dict[str, Any] | Rejected] = []
        try:
            rows += read(first, stop)
        except ValueError:  # UnicodeDecodeError and ArrowInvalid are ValueErrors
            rows = [_one_row(read, row) for row in range(first, stop)]
        yield from enumerate(rows, start=first)


def _one_row(
    read: Callable[[int, int], list[dict[str, Any]]], row: int
) -> dict[str, Any] | Rejected:
    try:
        return read(row, row + 1)[0]
    except ValueError as error:
        return Rejected("text is not UTF-8", str(error))
