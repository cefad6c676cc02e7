"""`metrics.jsonl`: one JSON row a line. A full disk delays rows, and a killed run loses at most its last line.

What the keys of a row mean: `dflash_ddp.glossary`.
"""

import itertools
import json
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_ddp.disk import write_whole

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run; a line that is torn, or still being written, is no row."""
    rows, file = [], folder / METRICS_FILE
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def heldout_row(folder: Path, step: int) -> dict[str, Any] | None:
    """What the evaluation at a step logged; None if there was none."""
    rows = read_rows(folder)
    return next((r for r in rows if r["step"] == step and "heldout/documents" in r), None)


def drop_rows_after(folder: Path, step: int) -> None:
    """Before a resume: forget rows of steps that will be made again, and what is no row."""
    if not (folder / METRICS_FILE).is_file():
        return
    kept = [json.dumps(row) + "\n" for row in read_rows(folder) if row["step"] <= step]
    write_whole(folder / METRICS_FILE, "".join(kept))  # a run may be killed here, too


def missing_steps(rows: list[dict[str, Any]], step: int, every: int) -> list[tuple[int, int]]:
    """Steps up to `step` that no training row tells of, as (first, last).

    Args:
        rows: of the file.
        step: optimizer steps that are complete.
        every: steps of a row now. It may have been more when the file was written.
    """
    ends = sorted({row["step"] for row in rows if "train/loss" in row and row["step"] <= step})
    if len(ends) > 1:
        every = max(every, int(statistics.median(b - a for a, b in itertools.pairwise(ends))))
    found = []
    for before, after in itertools.pairwise([0, *ends, step + 1]):
        due = (after - 1) // every * every  # the steps behind it are in the next row
        if due > before:
            found.append((before + 1, due))
    return found


class RowFile:
    """A file of lines on a disk that may be full or gone: what fails is written with the next."""

    def __init__(self, path: Path, make_folder: Callable[[], object]) -> None:
        """Go on behind the lines that are there; `make_folder` makes the file's, should it be gone."""
        self._path, self._make_folder = path, make_folder
        self._size = path.stat().st_size if path.is_file() else 0
        self._waiting: list[str] = []

    def append(self, line: str) -> None:
        """Add a line; a row that cannot be written now is a warning."""
        self._waiting.append(line + "\n")
        try:
            self._make_folder()
            with self._path.open("a", encoding="utf-8") as file:
                if file.tell() > self._size:
                    file.truncate(self._size)  # a part of an earlier try
                file.write("".join(self._waiting))
                file.flush()
                self._size = file.tell()
        except OSError as error:
            if len(self._waiting) == 1:
                logger.error("%s cannot be written, rows wait in memory: %s", self._path, error)
        else:
            self._waiting.clear()
