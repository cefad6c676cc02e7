"""Rows of a run that a disk or a kill has cut, for all who read them."""

import json

import pytest

import dflash_ddp.disk
from dflash_ddp.metrics_file import (
    METRICS_FILE,
    drop_rows_after,
    heldout_row,
    missing_steps,
    read_rows,
)
from dflash_ddp.report import read_run
from dflash_ddp.sweeps import last_values

ROWS = [
    {"step": 2, "train/loss": 0.1 + 0.2},
    {"step": 2, "heldout/documents": 5, "heldout/accept_length": 1.5},
    {"step": 4, "train/loss": 1e-9},
]


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"step": 6, "train/lo',
        b"\0\0\0\0",
        b"\xff\xfe\n",
        b'{"step": 6}{"st}',
        b"7\n",
        b'{"a": 1}\n',
    ],
)
def test_a_line_that_is_cut_is_no_row_and_hurts_no_reader(tmp_path, tail):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / METRICS_FILE).write_bytes(lines + tail)
    assert read_rows(tmp_path) == read_run(tmp_path).rows == ROWS
    assert heldout_row(tmp_path, 2) == ROWS[1]
    assert heldout_row(tmp_path, 4) is None
    assert last_values(tmp_path)["train/loss"] == 1e-9
    drop_rows_after(tmp_path, 2)
    assert (tmp_path / METRICS_FILE).read_bytes() == b"".join(lines.splitlines(True)[:2])


def test_no_file_has_no_rows_and_is_not_made(tmp_path):
    drop_rows_after(tmp_path, 3)
    assert read_rows(tmp_path) == []
    assert not (tmp_path / METRICS_FILE).exists()


@pytest.mark.parametrize(
    ("ends", "step", "every", "missing"),
    [
        ([], 0, 1, []),
        ([], 9, 10, []),  # the first row was not due yet
        ([], 10, 10, [(1, 10)]),
        ([], 57, 10, [(1, 50)]),
        ([10, 20, 30], 39, 10, []),
        ([10, 20, 30], 40, 10, [(31, 40)]),
        ([30, 40], 40, 10, [(1, 20)]),
        ([10, 20, 50, 60], 60, 10, [(21, 40)]),
        ([10, 20, 25, 30, 40], 45, 10, []),  # an evaluation brings a row of its own
        ([10, 20, 30, 40], 45, 1, []),  # rows were rarer then
        ([1, 2, 3, 4, 9, 10], 10, 1, [(5, 8)]),
        ([1, 2, 3, 10, 20], 29, 10, []),  # and here more frequent
        ([10, 20, 30], 20, 10, []),
    ],
)
def test_steps_without_a_row_are_known(ends, step, every, missing):
    rows = [{"step": end, "train/loss": 1.0} for end in ends]
    rows += [{"step": 5, "heldout/documents": 5}]  # tells of no training
    assert missing_steps(rows, step, every) == missing


def test_a_small_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        dflash_ddp.disk, "flush", lambda path: flushed.append((path.name, file.exists()))
    )
    file = tmp_path / "env.json"
    dflash_ddp.disk.write_whole(file, "{}")
    (part, _), folder = flushed
    assert flushed[0] == (part, False) and part.startswith(".env.json.")
    assert folder == (tmp_path.name, True)
    assert [path.name for path in tmp_path.iterdir()] == ["env.json"]
