"""Raw rows to token arrays, chunk by chunk, in one process or in several.

In: the raw rows of all sources. Out: one `Tokenised` a chunk, in the order of the rows whatever the
number of workers: documents end to end, and what was left out. A chunk is a few hundred rows or one
megabyte of lines, so that workers stay busy and little is in flight.

Invariants: the result is a function of the rows, tokenizer and settings; a worker process lives no
longer than its parent, ignores Ctrl-C (the parent answers it) and asks for no torch (some versions
of transformers load it all the same).
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from dflash_ddp.data.conversation import Rejected, parse_row
from dflash_ddp.data.reading import RawRow
from dflash_ddp.data.rendering import (
    HARMLESS,
    RenderedRow,
    Renderer,
    RenderSettings,
    render_row,
)

_CHUNK_ROWS = 256
_CHUNK_BYTES = 1 << 20
_CHUNKS_IN_FLIGHT = 3  # for each worker: one at work, one waiting, one being written

# Set once in each worker process, so that a chunk travels without the tokenizer.
_renderer: Renderer | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that gave no document (`whole_row`), or an answer left out of a row that did."""

    source: int
    row: int
    rejected: Rejected
    whole_row: bool


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The documents of one chunk, end to end, and what was left out.

    Attributes:
        ids: int32 [t].
        loss_mask: bool [t].
        lengths: int64 [d], tokens of each document; they sum to t.
        origins: int64 [d, 2], number of the source and row of each document.
        num_rows: rows in the chunk.
        num_truncated: documents cut at max_length.
        refusals: rows and answers left out.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    origins: np.ndarray
    num_rows: int
    num_truncated: int
    refusals: list[Refusal]


def tokenise(renderer: Renderer, rows: list[RawRow]) -> Tokenised:
    """All documents of these rows. Raises for nothing that a row may hold."""
    documents, origins, refusals = [], [], []
    for source, row, raw in rows:
        parsed = parse_row(raw)
        if isinstance(parsed, Rejected):
            result = RenderedRow([], [parsed])
        else:
            result = render_row(renderer, parsed)
        documents += result.documents
        origins += [(source, row)] * len(result.documents)
        if result.documents:
            refusals += [Refusal(source, row, reason, False) for reason in result.rejected]
        else:
            # One reason a row: sums of reasons must give sums of rows. Bad data comes first.
            reason = min(result.rejected, key=lambda rejected: rejected.reason in HARMLESS)
            refusals.append(Refusal(source, row, reason, True))
    empty = np.zeros(0, dtype=np.int32)
    return Tokenised(
        ids=np.concatenate([empty, *(document.ids for document in documents)]),
        loss_mask=np.concatenate([empty, *(d.loss_mask for d in documents)]).astype(bool),
        lengths=np.array([len(document.ids) for document in documents], dtype=np.int64),
        origins=np.array(origins, dtype=np.int64).reshape(-1, 2),
        num_rows=len(rows),
        num_truncated=sum(document.truncated for document in documents),
        refusals=refusals,
    )


def tokenised_chunks(
    rows: Iterable[RawRow],
    tokenizer: PreTrainedTokenizerFast,
    *,
    settings: RenderSettings,
    num_workers: int,
) -> Generator[Tokenised, None, None]:
    """Chunk after chunk, in order. With 0 or 1 workers the work is done in this process.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a worker died (out of memory?).
    """
    if num_workers < 2:
        renderer = Renderer(tokenizer, settings)
        for chunk in _chunks(rows):
            yield tokenise(renderer, chunk)
        return
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(pickle.dumps((tokenizer, settings)),),
    )
    in_flight: deque[Future[Tokenised]] = deque()
    try:
        for chunk in _chunks(rows):
            in_flight.append(executor.submit(_work, chunk))
            if len(in_flight) >= _CHUNKS_IN_FLIGHT * num_workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += len(row.raw) if isinstance(row.raw, bytes) else 0
        if len(chunk) >= _CHUNK_ROWS or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _start_worker(pickled: bytes) -> None:
    """Make this process's renderer. The tokenizer comes pickled, so that it is loaded only here."""
    global _renderer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    tokenizer, settings = pickle.loads(pickled)
    _renderer = Renderer(tokenizer, settings)


def _exit_with_parent() -> None:
    """Needed when the parent is killed: the pool's queue never closes for its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(rows: list[RawRow]) -> Tokenised:
    assert _renderer is not None
    return tokenise(_renderer, rows)
