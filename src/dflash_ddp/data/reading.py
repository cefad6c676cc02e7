"""Rows of text, from files or from a hub, as conversations in a fixed order.

In: `data.path`: a JSON-lines file (`.jsonl`, `.json`, `.ndjson`, each also with `.gz`), a `.json`
file that is one array of rows, a parquet file, a glob or a directory of such files, or the name of
a data set on the hub. Out:

    open_sources -> [Source]         what there is to read
    raw_rows     -> RawRow           its place, and a line of bytes or a dict from arrow
    parse_row    -> Conversation     messages that all have a known `role` and a `content` of text

Two forms of a turn are known, `role`/`content` and `from`/`value`, under either of the columns
`messages` and `conversations`.

Invariants: a bad row ends nothing but itself, by `Rejected`; order and places of rows depend on the
source alone; turns keep their order and none is left out; a key whose value is null is the same as
no key, since arrow pads every struct with nulls (JSON lines and their parquet copy are alike).
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import datasets

LINE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
SUFFIXES = (*LINE_SUFFIXES, ".parquet")
ROLES = {"system": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant")
EXTRA_ROLES = ("tool", "developer")
"""Only for turns of the form role/content: under from/value their content has no agreed shape."""

_SLICE_ROWS = 256
_BOM = b"\xef\xbb\xbf"


class Source(NamedTuple):
    """One file, or one split on the hub: its name for messages, and the split if it is one."""

    name: str
    dataset: "datasets.Dataset | None" = None


class RawRow(NamedTuple):
    """An unparsed row and its place, `file:line` (from 1) or `name[row]` (from 0).

    `raw` is the refusal itself if the text cannot be decoded.
    """

    place: str
    raw: "bytes | dict[str, Any] | Rejected"


class Conversation(NamedTuple):
    """Messages with `role`, `content` and what else the row had (`tool_calls`, ...), and tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class Rejected(Exception):
    """A row, or one answer of it, cannot be used. Rows are counted by `reason`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


SPLIT_KEYS = {"data.path": "data.split", "data.heldout": "data.heldout_split"}


def open_sources(
    path: str, *, split: str = "train", revision: str | None = None, key: str = "data.path"
) -> list[Source]:
    """What `data.path` or `data.heldout` means, as sorted files or one split of a hub data set.

    Raises:
        ValueError: nothing there, no file of a known kind, or the hub refused.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        files = sorted(file for file in local.iterdir() if _is_data(file) and not _is_hidden(file))
    elif local.is_file():
        files = [local]
    elif any(sign in path for sign in "*?["):
        # Path.glob refuses absolute patterns, so it starts from the root.
        absolute = local.absolute()
        found = Path(absolute.anchor).glob(str(absolute.relative_to(absolute.anchor)))
        files = sorted(file for file in found if file.is_file() and not _is_hidden(file))
    elif path.startswith((".", "/", "~")) or _is_data(local) or path.count("/") > 1:
        files = []
    else:
        return [_open_hub(path, split, revision, key)]
    if not files:
        raise ValueError(
            f"{key}={path}: there is no such file, nor one ending in {', '.join(SUFFIXES)}"
        )
    odd = [str(file) for file in files if not _is_data(file)]
    if odd:
        raise ValueError(f"{key}={path}: {odd} do not end in one of {', '.join(SUFFIXES)}")
    return [Source(str(file)) for file in files]


def _is_data(file: Path) -> bool:
    return file.name.endswith(SUFFIXES)


def _is_hidden(file: Path) -> bool:
    return file.name.startswith(".")  # as a Mac's `._a.jsonl`, which holds no text


def content_hash(sources: list[Source]) -> str:
    """Hash of all that can be read: every byte of the files, or the hub's own fingerprint."""
    parts = []
    for source in sources:
        if source.dataset is not None:
            # The fingerprint covers revision, files and split. It has no public name in `datasets`.
            parts.append(source.dataset._fingerprint)
        else:
            with Path(source.name).open("rb") as file:
                parts.append(hashlib.file_digest(file, "blake2b").hexdigest())
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def raw_rows(sources: list[Source]) -> Iterator[RawRow]:
    """Every row of every source in order. Blank lines are passed over, but they count as lines.

    Raises:
        ValueError: a whole file cannot be read as what its name says.
    """
    for source in sources:
        if source.dataset is not None:
            yield from _hub_rows(source.name, source.dataset)
        elif source.name.endswith(LINE_SUFFIXES):
            yield from _lines(source.name)
        else:
            yield from _parquet_rows(source.name)


def _open_hub(path: str, split: str, revision: str | None, key: str) -> Source:
    import datasets  # slow, and not needed for files

    try:
        dataset = datasets.load_dataset(path, split=split, revision=revision)
    except (
        OSError,
        ValueError,
        RuntimeError,
        StopIteration,
        datasets.exceptions.DatasetsError,
    ) as error:
        raise ValueError(
            f"{key}={path} is no local file, and the hub did not give it with "
            f"{SPLIT_KEYS[key]}={split}, data.revision={revision}: {error or type(error).__name__}"
        ) from error
    wanted = _wanted_columns(f"{key}={path}", dataset.column_names)
    return Source(f"{path}:{split}", dataset.select_columns(wanted))


def _wanted_columns(name: str, columns: list[str]) -> list[str]:
    wanted: list[str] = [key for key in ("messages", "conversations", "tools") if key in columns]
    if not set(wanted) - {"tools"}:
        raise ValueError(f"{name} has no column 'messages' or 'conversations', only {columns}")
    return wanted


def _lines(name: str) -> Iterator[RawRow]:
    number, may_be_array = 0, name.removesuffix(".gz").endswith(".json")
    try:
        with gzip.open(name) if name.endswith(".gz") else Path(name).open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(_BOM) if number == 1 else line
                if not text.strip():
                    continue
                if may_be_array and text.lstrip().startswith(b"["):
                    yield from _array_rows(name, text + file.read())
                    return
                may_be_array = False
                yield RawRow(f"{name}:{number}", text)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{name} after line {number}: {error}; is it whole?") from error


def _array_rows(name: str, text: bytes) -> Iterator[RawRow]:
    """A file that is one JSON array: each of its items goes the way of a line."""
    try:
        rows = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} begins with [ and is no JSON array: {error}; write one row a line"
        ) from error
    for number, row in enumerate(rows):
        yield RawRow(f"{name}[{number}]", json.dumps(row).encode())


def _parquet_rows(name: str) -> Iterator[RawRow]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(name) as file:
            columns = _wanted_columns(name, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_SLICE_ROWS, columns=columns):

                def read(start: int, stop: int, batch: Any = batch) -> list[Any]:
                    return batch[start:stop].to_pylist()

                for row in _slice(read, 0, len(batch)):
                    yield RawRow(f"{name}[{number}]", row)
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise ValueError(f"{name} after row {number}: {error}; is it whole?") from error


def _hub_rows(name: str, dataset: "datasets.Dataset") -> Iterator[RawRow]:
    def read(start: int, stop: int) -> list[Any]:
        columns = dataset[start:stop]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    for first in range(0, len(dataset), _SLICE_ROWS):
        rows = _slice(read, first, min(first + _SLICE_ROWS, len(dataset)))
        yield from (RawRow(f"{name}[{first + at}]", row) for at, row in enumerate(rows))


def _slice(read: Callable[[int, int], list[Any]], start: int, stop: int) -> list[Any]:
    """Some rows of an arrow table; with undecodable text among them they are read one by one."""
    try:
        return read(start, stop)
    except ValueError as error:  # UnicodeDecodeError and ArrowInvalid are ValueErrors
        if stop - start == 1:
            decoding = isinstance(error, UnicodeDecodeError)
            return [Rejected("text is not UTF-8" if decoding else "unreadable row", str(error))]
        return [row for at in range(start, stop) for row in _slice(read, at, at + 1)]


def parse_row(raw: bytes | dict[str, Any] | Rejected) -> Conversation:
    """A raw row as a conversation. Raises `Rejected`, and nothing else, for what a row may hold."""
    if isinstance(raw, Rejected):
        raise raw
    try:
        row = _json_object(raw) if isinstance(raw, bytes) else raw
        return Conversation(_messages(row), _tools(row.get("tools")))
    except RecursionError:
        raise Rejected("nested too deeply") from None


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8").strip())
        if rb"\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise Rejected("text is not UTF-8", str(error)) from None
    except UnicodeEncodeError as error:
        raise Rejected("text holds half of a surrogate pair", str(error)) from None
    except ValueError as error:
        raise Rejected("line is not JSON", f"{error}; the line ends in {line[-40:]!r}") from None
    if not isinstance(row, dict):
        raise Rejected("line is not a JSON object", f"it is {type(row).__name__}")
    return row


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    turns = row.get("messages")
    if turns is None:
        turns = row.get("conversations")
    if turns is None:
        found = [key for key, value in row.items() if value is not None]
        raise Rejected("no 'messages' or 'conversations'", f"columns found: {found}")
    if not isinstance(turns, list) or not turns:
        raise Rejected("the messages are no list or an empty one", f"{turns!r:.60}")
    return [_message(turn, f"turn {number}: ") for number, turn in enumerate(turns)]


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Rejected("a turn is not an object", f"{where}{turn!r:.60}")
    turn = _without_nulls(turn)
    written, content, others = turn.get("role"), turn.get("content"), turn
    roles = ROLES | {role: role for role in EXTRA_ROLES}
    if "role" not in turn and "from" in turn:
        roles, written, content, others = ROLES, turn["from"], turn.get("value"), {}
    if not isinstance(written, str) or written.strip().lower() not in roles:
        raise Rejected(f"unknown role {written!r:.40}", f"{where}keys found: {sorted(turn)}")
    role = roles[written.strip().lower()]
    if content is None and role == "assistant" and others.get("tool_calls"):
        content = ""  # null beside a tool call is legal; no template prints "" as "None"
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text")
    if not isinstance(content, str):
        raise Rejected("a content is not text", f"{where}{turn!r:.60}")
    return {**others, "role": role, "content": content}


def _tools(value: object) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Rejected("the tools are not JSON", str(error)) from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Rejected("the tools are not a list of objects", f"{value!r:.60}")
    return [_without_nulls(tool) for tool in value]


def _without_nulls(value: Any) -> Any:
    """The value without the keys whose value is None, at every depth; nulls inside lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
