"""A run's folder that is removed while it works: made anew and locked, and never shared with another run."""

import fcntl
import multiprocessing
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from ranks import report
from training import compose_config, train

from dflash_ddp.folder import FolderLostError, OwnFolder, claim_folder, hold_folder
from dflash_ddp.metrics_file import METRICS_FILE, RowFile

pytestmark = pytest.mark.dist

DRAFTER = 1
SHORT = ["split=1t1d", "steps=8", "eval.every=0"]
FORK = multiprocessing.get_context("fork")


def put_in_place(own: Path, other: Path) -> None:
    """The run's folder goes, another run's comes, and nobody writes in between."""
    own.rename(own.with_name(f"{own.name} is gone"))
    other.rename(own)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FIRST_WRITES = {
    "a row": ["logging.every=1", "checkpoint.every=0"],
    "a checkpoint": ["logging.every=8", "checkpoint.every=2"],
    "failure.json": ["logging.every=8", "checkpoint.every=0"],
}


@pytest.mark.parametrize("first", FIRST_WRITES)
def test_a_run_ends_and_leaves_the_folder_of_another_alone(material, tmp_path, first):
    """Whatever it would write there first. The other has more rows and a later checkpoint."""
    own, other = material.output(f"lost before {first}"), tmp_path / "other"
    claim_folder(compose_config(material.overrides("x", f"output_dir={other}")), {}, "another")
    (other / METRICS_FILE).write_text("".join(f'{{"step": {n}}}\n' for n in range(500)))
    (other / "checkpoints" / "step_00000500").mkdir(parents=True)
    before = files(other)
    events = {(DRAFTER, "train step", 4): partial(put_in_place, own, other)}
    if first == "failure.json":
        events[DRAFTER, "train step", 6] = "raise"
    overrides = material.overrides(own.name, *SHORT, *FIRST_WRITES[first])
    outcomes = train(2, overrides, events, check=False)
    assert {outcome.exit_code for outcome in outcomes} == {13}, report(outcomes)
    cause = f"{own} was removed while this run worked, and another run has begun"
    if first == "failure.json":
        cause = "the dog ate it"
    assert cause in outcomes[DRAFTER].output, report(outcomes)
    assert files(own) == before
    assert [p.name for p in (own / "checkpoints").iterdir()] == ["step_00000500"]


def is_locked(folder: Path) -> bool:
    """For whoever opens it anew, as another run does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.parametrize("by_hand", [False, True], ids=["gone", "made by hand"])
def test_what_a_run_has_made_anew_is_locked_like_what_it_claimed(tmp_path, by_hand):
    folder = tmp_path / "run"
    folder.mkdir()
    own = OwnFolder(folder)
    rows = RowFile(folder / METRICS_FILE, own.keep)
    rows.append("1")
    assert not is_locked(folder)  # by rank 0, which is not here
    shutil.rmtree(folder)
    if by_hand:
        folder.mkdir()
    rows.append("2")
    assert (folder / METRICS_FILE).read_text() == "2\n"
    assert is_locked(folder)
    own.check()


def _hold(folder: Path, ready, end) -> None:
    hold_folder(folder)
    ready.set()
    end.wait(30)


def test_a_folder_that_another_run_is_about_to_claim_is_left_to_it(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    own = OwnFolder(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    ready, end = FORK.Event(), FORK.Event()
    other = FORK.Process(target=_hold, args=(folder, ready, end))
    other.start()
    assert ready.wait(30)
    with pytest.raises(FolderLostError):
        RowFile(folder / METRICS_FILE, own.keep).append("1")
    end.set()
    other.join(30)
    assert not list(folder.iterdir())
