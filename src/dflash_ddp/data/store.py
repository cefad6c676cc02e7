"""Tokenised documents on disk: written once, then read by every rank through a memory map.

In: a data source, a tokenizer and the render settings. Out: a directory named by a hash of all that
decides its content, so that a change of data, template, tokenizer or length never meets old tokens:

    tokens.bin      int32  [num_tokens]           all documents end to end
    loss_mask.bin   uint8  [num_tokens]           1 on tokens that the target would generate
    offsets.npy     int64  [num_documents + 1]    where each document starts
    origins.npy     int64  [num_documents, 2]     number of its source and of its row
    report.json                                   counts, settings, what was left out and why

Invariants: a directory under its final name is complete (written beside it, synced, renamed); of
several processes that write the same one, the first to finish wins and the others use its work;
document order is row order, whatever the number of workers.
"""

import hashlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from dflash_ddp.data.reading import Kind, Source, content_hash, open_sources, place, raw_rows
from dflash_ddp.data.rendering import Renderer, RenderSettings
from dflash_ddp.data.report import ReportBuilder, check_bad_share, refuse_empty
from dflash_ddp.data.tokenising import Tokenised, tokenised_chunks

FORMAT = 1
"""Part of the hash: raise it when the code gives other ids, masks or files for the same input."""

_LOG_EVERY_S = 10.0
_SCAN_TOKENS = 1 << 22

logger = logging.getLogger(__name__)


class DocumentStore:
    """The documents of a finished directory.

    Attributes:
        path: the directory.
        fingerprint: hash of all that decides the content; the directory's name.
        lengths: int32 [num_documents], tokens of each document.
        report: counts and settings of the run that wrote it (see `report.format_report`).

    Raises:
        ValueError: the directory is not one of ours, or its files do not fit together.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        report = self.path / "report.json"
        if not report.is_file():
            raise ValueError(f"{self.path} holds no tokenised documents (no report.json)")
        self.report: dict[str, Any] = json.loads(report.read_text())
        self.fingerprint: str = self.report["fingerprint"]
        self._offsets: np.ndarray = np.load(self.path / "offsets.npy")
        self._origins: np.ndarray = np.load(self.path / "origins.npy", mmap_mode="r")
        self._ids = np.asarray(np.memmap(self.path / "tokens.bin", dtype="<i4", mode="r"))
        self._loss_mask = np.asarray(np.memmap(self.path / "loss_mask.bin", dtype=bool, mode="r"))
        self.lengths = np.diff(self._offsets).astype(np.int32)
        num_tokens = int(self._offsets[-1])
        if not (
            self.report["format"] == FORMAT
            and len(self._ids) == len(self._loss_mask) == num_tokens
            and len(self._origins) == len(self.lengths)
        ):
            raise ValueError(
                f"{self.path}: format {self.report['format']} (this code: {FORMAT}), "
                f"{len(self._ids)} ids, {len(self._loss_mask)} mask bytes, {num_tokens} tokens by "
                "offsets; these must agree, delete the directory to tokenise again"
            )

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
        source, row = self._origins[number]
        name, kind = self.report["sources"][source]
        return place(name, Kind(kind), int(row))

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
            outside = (ids < 0) | (ids >= table_rows)
            for found, rule in (
                (outside, f"token ids must be below {table_rows}, the target's table rows"),
                (ids == mask_token_id, f"mask_token_id={mask_token_id} must not occur in the data"),
            ):
                if found.any():
                    at = start + int(found.argmax())
                    number = int(np.searchsorted(self._offsets, at, side="right")) - 1
                    raise ValueError(
                        f"{rule}; id {self._ids[at]} stands at token {at - self._offsets[number]} "
                        f"of document {number}, from {self.origin(number)}"
                    )


def prepare(
    path: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    settings: RenderSettings,
    cache_dir: str | Path,
    split: str = "train",
    revision: str | None = None,
    num_workers: int = 0,
    max_bad_share: float = 0.05,
) -> DocumentStore:
    """Tokenise a data set, or find it tokenised under `cache_dir`.

    Any number of processes may call this at once; each returns the same complete directory.

    Args:
        path: file, directory, glob or hub name (see `reading`).
        tokenizer: the target's fast tokenizer, with its chat template.
        settings: what decides ids and masks besides the tokenizer.
        cache_dir: parent of the directories.
        split: of a hub data set.
        revision: of a hub data set.
        num_workers: processes that tokenise; 0 or 1 is this process alone.
        max_bad_share: largest part of the rows, 0..1, that may be malformed or refused.

    Raises:
        ValueError: nothing to read, nothing left, or too many bad rows; with counts by reason.
    """
    sources = open_sources(path, split=split, revision=revision)
    key = cache_key(sources, tokenizer, settings)
    directory = Path(cache_dir) / key
    if directory.exists():
        logger.info("using tokenised documents of %s in %s", path, directory)
    else:
        mode = settings.enable_thinking
        if mode is not None and "enable_thinking" not in str(tokenizer.chat_template):
            logger.warning("the chat template does not know enable_thinking=%s", mode)
        builder = ReportBuilder(sources, tokenizer.name_or_path, settings=settings)
        rows = raw_rows(sources)
        chunks = tokenised_chunks(rows, tokenizer, settings=settings, num_workers=num_workers)
        _write(directory, chunks, builder)
    store = DocumentStore(directory)
    check_bad_share(store.report, max_bad_share)
    return store


def cache_key(
    sources: list[Source], tokenizer: PreTrainedTokenizerFast, settings: RenderSettings
) -> str:
    """Hash of data, tokenizer, template, settings and code version, as 32 hex digits."""
    identity = Renderer(tokenizer, settings).identity()
    text = f"{FORMAT}|{content_hash(sources)}|{identity}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write(
    directory: Path, chunks: Generator[Tokenised, None, None], builder: ReportBuilder
) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    writer = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    partial = directory.with_name(f".{directory.name}.{writer}")
    partial.mkdir()
    try:
        with (
            (partial / "tokens.bin").open("wb") as ids,
            (partial / "loss_mask.bin").open("wb") as m,
        ):
            lengths, origins = _write_tokens(chunks, builder, ids=ids, loss_mask=m)
        refuse_empty(builder.report)
        np.save(partial / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
        np.save(partial / "origins.npy", origins)
        report = builder.finish(directory.name, FORMAT, lengths)
        (partial / "report.json").write_text(json.dumps(report, indent=1))
        for file in [*partial.iterdir(), partial]:
            _sync(file)
        try:
            partial.rename(directory)
        except OSError:
            if not directory.exists():
                raise
            logger.info("another process was first to write %s", directory)
        _sync(directory.parent)
    finally:
        chunks.close()  # ends the worker processes, also after a full disk
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokens(
    chunks: Generator[Tokenised, None, None],
    builder: ReportBuilder,
    *,
    ids: IO[bytes],
    loss_mask: IO[bytes],
) -> tuple[np.ndarray, np.ndarray]:
    """Write the tokens of all chunks; give lengths int64 [d] and origins int64 [d, 2]."""
    lengths, origins = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
    start_s = logged_s = time.monotonic()
    for chunk in chunks:
        ids.write(chunk.ids.astype("<i4", copy=False).tobytes())
        loss_mask.write(chunk.loss_mask.tobytes())
        lengths.append(chunk.lengths)
        origins.append(chunk.origins)
        builder.add(chunk)
        now_s = time.monotonic()
        if now_s - logged_s >= _LOG_EVERY_S:
            logged_s = now_s
            num_rows, num_tokens = builder.report["num_rows"], builder.report["num_tokens"]
            rate = num_rows / (now_s - start_s)
            logger.info("tokenised %d rows, %d tokens, %.0f rows/s", num_rows, num_tokens, rate)
    return np.concatenate(lengths), np.concatenate(origins)


def _sync(path: Path) -> None:
    """Force a file or a directory's entries to disk: a rename must not outrun its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
