"""Raw rows to documents, row by row, in one process or in several.

In: the raw rows of all sources. Out: for each row, in order, its documents and what was refused.

Invariants: the result is a function of the rows, tokenizer and settings, and not of the number of
workers; a bounded number of rows is in flight; a worker process lives no longer than its parent and
ignores Ctrl-C (the parent answers it).
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from dflash_ddp.data.reading import RawRow, Rejected, parse_row
from dflash_ddp.data.rendering import Document, Renderer, RenderSettings, render_row

_CHUNK_ROWS = 64
_CHUNKS_IN_FLIGHT = 16  # for each worker; all of them are done before the next rows are read

# Set once in each worker process, so that a row travels without the tokenizer.
_renderer: Renderer | None = None


class TokenisedRow(NamedTuple):
    """The place of a row, what it gave and what was refused."""

    place: str
    documents: list[Document]
    rejected: list[Rejected]


def tokenised_rows(
    rows: Iterator[RawRow],
    tokenizer: PreTrainedTokenizerFast,
    *,
    settings: RenderSettings,
    num_workers: int,
) -> Generator[TokenisedRow, None, None]:
    """All rows in order. With 0 or 1 workers the work is done in this process.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a worker died (out of memory?).
    """
    if num_workers < 2:
        renderer = Renderer(tokenizer, settings)
        yield from (_tokenised(renderer, row) for row in rows)
        return
    num_in_flight = num_workers * _CHUNKS_IN_FLIGHT * _CHUNK_ROWS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (tokenizer, settings)) as pool:
        while batch := list(islice(rows, num_in_flight)):
            yield from pool.map(_work, batch, chunksize=_CHUNK_ROWS)


def _tokenised(renderer: Renderer, row: RawRow) -> TokenisedRow:
    try:
        documents, rejected = render_row(renderer, parse_row(row.raw))
    except Rejected as error:
        documents, rejected = [], [error]
    except BaseException as error:  # none is known; the row that brings one is worth a name
        error.add_note(f"the row at {row.place}")
        raise
    return TokenisedRow(row.place, documents, rejected)


def _start_worker(tokenizer: PreTrainedTokenizerFast, settings: RenderSettings) -> None:
    global _renderer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _renderer = Renderer(tokenizer, settings)


def _exit_with_parent() -> None:
    """Needed when the parent is killed: the pool's queue never closes for its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(row: RawRow) -> TokenisedRow:
    assert _renderer is not None
    return _tokenised(_renderer, row)
