"""Tokenised documents on disk: written once, then read by every rank through a memory map.

In: a data source, a tokenizer and the render settings. Out: a directory named by a hash of all that
decides its content, so that a change of data, template, tokenizer or length never meets old tokens:

    tokens.bin      int32  [num_tokens]           all documents end to end
    loss_mask.bin   uint8  [num_tokens]           1 on tokens that the target would generate
    offsets.bin     int64  [num_documents + 1]    where each document starts
    origins.txt     a line a document             where it comes from, `file:line` or `name[row]`
    report.json                                   counts, settings, what was left out and why

Invariants: a directory under its final name is complete (written beside it, synced, renamed); of
several processes that write the same one, the first to finish wins and the others use its work;
document order is row order, whatever the number of workers; text that changes while it is read is
not kept.
"""

import hashlib
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from dflash_ddp.data.reading import Source, content_hash, open_sources, raw_rows
from dflash_ddp.data.rendering import Renderer, RenderSettings
from dflash_ddp.data.report import count_row, format_report, length_bins, new_report
from dflash_ddp.data.tokenising import TokenisedRow, tokenised_rows
from dflash_ddp.disk import flush

FORMAT = 4
"""Part of the hash: raise it when the code gives other ids, masks or files for the same input."""

_LOG_EVERY_ROWS = 20_000
_SCAN_TOKENS = 1 << 22

logger = logging.getLogger(__name__)


class DocumentStore:
    """The documents of a finished directory.

    Attributes:
        path: the directory.
        fingerprint: hash of all that decides the content; the directory's name.
        content: hash of the content itself. A template may print the date.
        lengths: int32 [num_documents], tokens of each document.
        report: counts and settings of the run that wrote it (see `format_report`).

    Raises:
        ValueError: the directory is not one of ours, or its files do not fit together.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        report = self.path / "report.json"
        if not report.is_file():
            raise ValueError(f"{self.path} holds no tokenised documents (no report.json)")
        try:
            self.report: dict[str, Any] = json.loads(report.read_text())
            self.fingerprint: str = self.report["fingerprint"]
            self.content: str = self.report["content"]
            self._offsets = np.fromfile(self.path / "offsets.bin", dtype="<i8")
            self._ids = np.asarray(np.memmap(self.path / "tokens.bin", dtype="<i4", mode="r"))
            mask = np.memmap(self.path / "loss_mask.bin", dtype=bool, mode="r")
            self._loss_mask = np.asarray(mask)
            lengths = np.diff(self._offsets)
            self.lengths = lengths.astype(np.int32)
            sizes = {
                len(self._ids),
                len(self._loss_mask),
                int(self._offsets[-1]),
                int(lengths.sum()),
            }
            if self.report["format"] != FORMAT or len(sizes) > 1 or lengths.min() < 1:
                raise ValueError(
                    f"format {self.report['format']} must be {FORMAT}, and the numbers of tokens "
                    f"in its files must agree: {sizes}"
                )
        except (ValueError, OSError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is damaged: {error}; delete it, and the text is tokenised again"
            ) from error

    @property
    def num_documents(self) -> int:
        """Documents in the store; at least 1."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self._ids)

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [n] and loss mask bool [n] of one document: views, not to be written to."""
        start, stop = self._offsets[number], self._offsets[number + 1]
        return self._ids[start:stop], self._loss_mask[start:stop]

    def origin(self, number: int) -> str:
        """Where a document comes from, as `file:line` or `name[row]`."""
        with (self.path / "origins.txt").open(encoding="utf-8", errors="surrogateescape") as lines:
            return next(islice(lines, number, None)).rstrip("\n")

    def check_ids(self, table_rows: int, mask_token_id: int) -> None:
        """Check every id against the target's embedding table; one scan at memory speed.

        Raises:
            ValueError: the mask token or an id lies outside the table, or a document holds the mask
                token, which must mean "to be drafted" and nothing else.
        """
        if not 0 <= mask_token_id < table_rows:
            raise ValueError(
                f"mask_token_id={mask_token_id} must lie in 0..{table_rows - 1}, "
                "the rows of the target's embedding table"
            )
        for start in range(0, self.num_tokens, _SCAN_TOKENS):
            ids = self._ids[start : start + _SCAN_TOKENS]
            wrong = (ids < 0) | (ids >= table_rows) | (ids == mask_token_id)
            if wrong.any():
                at = start + int(wrong.argmax())
                number = int(np.searchsorted(self._offsets, at, side="right")) - 1
                raise ValueError(
                    f"id {self._ids[at]} stands at token {at - self._offsets[number]} of document "
                    f"{number}, from {self.origin(number)}; ids must be below {table_rows}, the "
                    f"target's table rows, and mask_token_id={mask_token_id} must not occur"
                )


def prepare(
    path: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    settings: RenderSettings,
    cache_dir: str | Path,
    split: str = "train",
    revision: str | None = None,
    key: str = "data.path",
    num_workers: int = 0,
    max_bad_share: float,
) -> DocumentStore:
    """Tokenise a data set (see `reading.open_sources`), or find it tokenised under `cache_dir`.

    Any number of processes may call this at once; each returns the same complete directory. Up to
    one worker is this process alone. `max_bad_share` is the largest part of the rows, 0..1, that
    may be malformed or refused.

    Raises:
        ValueError: nothing to read, nothing left, or too many bad rows; with counts by reason.
    """
    sources = open_sources(path, split=split, revision=revision, key=key)
    stamps = _stamps(sources)
    identity = Renderer(tokenizer, settings).identity()
    text = f"{FORMAT}|{content_hash(sources)}|{identity}"
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    directory = Path(cache_dir) / fingerprint
    if directory.exists():
        logger.info("using tokenised documents of %s in %s", path, directory)
    else:
        mode = settings.enable_thinking
        if mode is not None and "enable_thinking" not in str(tokenizer.chat_template):
            logger.warning("the chat template does not know enable_thinking=%s", mode)
        report = new_report([source.name for source in sources], settings)
        report |= {"format": FORMAT, "fingerprint": fingerprint}
        rows = tokenised_rows(
            raw_rows(sources), tokenizer, settings=settings, num_workers=num_workers
        )
        _write(directory, rows, report, is_same=lambda: _stamps(sources) == stamps)
    store = DocumentStore(directory)
    share = store.report["num_bad_rows"] / store.report["num_rows"]
    if share > max_bad_share:
        raise ValueError(
            f"{share:.1%} of the rows are bad, more than data.max_bad_share={max_bad_share}; "
            f"mend the data or raise it\n{format_report(store.report)}"
        )
    return store


def documents_in_both(
    text: DocumentStore, heldout: DocumentStore, num_heldout: int
) -> dict[int, int]:
    """Which of the first held-out documents are training documents too, token for token, and which.

    Only training documents of a held-out length are read.
    """
    ids = [heldout.document(n)[0].tobytes() for n in range(min(num_heldout, heldout.num_documents))]
    numbers = {one: number for number, one in enumerate(ids)}
    found: dict[int, int] = {}
    for document in np.flatnonzero(np.isin(text.lengths, heldout.lengths[: len(ids)])).tolist():
        number = numbers.get(text.document(document)[0].tobytes())
        if number is not None:
            found.setdefault(number, document)
    return found


def _stamps(sources: list[Source]) -> list[tuple[int, int]]:
    """Size and time of each file."""
    files = [Path(source.name).stat() for source in sources if source.dataset is None]
    return [(file.st_size, file.st_mtime_ns) for file in files]


def _write(
    directory: Path,
    rows: Generator[TokenisedRow, None, None],
    report: dict[str, Any],
    *,
    is_same: Callable[[], bool],
) -> None:
    """Make the directory from all rows, complete or not at all; the report gains its counts."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    writer = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    partial = directory.with_name(f".{directory.name}.{writer}")
    partial.mkdir()
    try:
        with closing(rows):  # ends the worker processes, also after a full disk
            _write_rows(partial, rows, report)
        if not is_same():
            raise ValueError(f"{report['sources']}: a file changed while it was read; start again")
        if report["num_documents"] == 0:
            names, counts = report["sources"], format_report(report)
            raise ValueError(f"no usable row among those of {names}\n{counts}")
        (partial / "report.json").write_text(json.dumps(report, indent=1))
        for file in [*partial.iterdir(), partial]:
            flush(file)
        try:
            partial.rename(directory)
        except OSError:
            if not directory.exists():
                raise
            logger.info("another process was first to write %s", directory)
        flush(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_rows(
    partial: Path, rows: Generator[TokenisedRow, None, None], report: dict[str, Any]
) -> None:
    offsets, content = [0], hashlib.blake2b(digest_size=16)
    with (
        (partial / "tokens.bin").open("wb") as ids,
        (partial / "loss_mask.bin").open("wb") as loss_mask,
        (partial / "origins.txt").open("w", encoding="utf-8", errors="surrogateescape") as origins,
    ):
        for place, documents, rejected in rows:
            for document in documents:
                for file, values in (
                    (ids, document.ids.astype("<i4", copy=False)),
                    (loss_mask, document.loss_mask),
                ):
                    file.write(values.tobytes())
                    content.update(values.tobytes())
                origins.write(f"{place}\n")
                offsets.append(offsets[-1] + len(document.ids))
            count_row(report, place, documents, rejected)
            if report["num_rows"] % _LOG_EVERY_ROWS == 0:
                logger.info("tokenised %d rows", report["num_rows"])
    starts = np.array(offsets, dtype="<i8")
    starts.tofile(partial / "offsets.bin")
    content.update(starts.tobytes())
    report["content"] = content.hexdigest()
    report["lengths"] = length_bins(np.diff(starts), report["max_length"])
