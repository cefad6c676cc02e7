"""The real command, end to end, with a tiny random target: what must not change a run, and how it ends.

Batches have 256 tokens and blocks 4, so a run takes as long as its imports. Runs that several tests
look at are made once; what is compared with a run of the command, or refused by its ranks alone, comes
from ranks that are forked (`training`).
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from material import STEPS, TOKENS_PER_BATCH, Material
from ranks import report
from runs import Ended, Running, all_rows, assert_equal_state, rows, run, running, state
from targets import build_tokenizer
from training import train

from dflash_ddp import glossary
from dflash_ddp.data.packing import Packing, packed_batch
from dflash_ddp.data.rendering import RenderSettings
from dflash_ddp.data.store import DocumentStore, prepare
from dflash_ddp.drafter.blocks import anchor_candidates

pytestmark = pytest.mark.dist

@pytest.fixture(scope="session")
def one_target(material) -> Path:
    """The run that others are compared with: one target rank, one drafter rank."""
    run(2, material.overrides("1t1d", "split=1t1d"))
    return material.output("1t1d")


# What must not change a run.


def test_a_run_writes_every_step_and_both_ends(one_target):
    trained = [row for row in rows(one_target) if "train/loss" in row]
    measured = [row["step"] for row in rows(one_target) if "heldout/walk_on_text" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6]
    assert measured == [0, 3, 6]
    assert trained[-1]["train/loss"] < trained[0]["train/loss"]
    assert (one_target / "export" / "model.safetensors").is_file()
    assert "heldout/walk_on_text" in (one_target / "report.html").read_text()


def evaluated(folder: Path) -> list[dict]:
    return [row for row in rows(folder) if "heldout/walk_on_text" in row]


def test_a_run_may_start_from_the_drafter_of_another(material, one_target):
    """Before its first step it is as good, slot by slot, as the best of that one, which its card names."""
    best = max(evaluated(one_target)[1:], key=lambda row: row["heldout/walk_on_text"])
    card = (one_target / "export" / "README.md").read_text()
    assert f"{best['step']} optimizer steps" in card
    assert f"its walk is {best['heldout/walk_on_text']:.3f}" in card
    start = f"drafter.init_from={one_target / 'export'}"
    train(2, material.overrides("warm", "split=1t1d", "steps=1", "optim.lr=1e-9", start))
    started = evaluated(material.output("warm"))[0]
    for row in (best, started):
        del row["step"], row["tokens"]
    assert started == best
    refused = train(
        2, material.overrides("refused", "split=1t1d", "drafter.block_size=5", start), check=False
    )
    assert all(outcome.exit_code for outcome in refused), report(refused)
    assert "block_size: 4 there, 5 here" in refused[0].output, report(refused)


def test_every_number_that_a_run_logs_is_in_the_glossary(one_target):
    logged = {key for row in all_rows(one_target) for key in row}
    assert {key for key in logged if glossary.find(key) is None} == set()
    assert {"wait/drafter_share", "channel/slots_full", "heldout/slot_1"} <= logged


@pytest.mark.parametrize(
    ("num_processes", "split"),
    [(4, ["split.targets=3", "split.drafters=1"]), (1, ["split=colocated"])],
    ids=["3 targets", "colocated"],
)
def test_who_computes_the_features_changes_no_digit(material, one_target, num_processes, split):
    one_process = ["split.targets=1", "split.drafters=1"] if num_processes == 1 else []
    name = f"{num_processes} processes"
    train(num_processes, material.overrides(name, *split, *one_process))
    assert rows(material.output(name)) == rows(one_target)
    assert_equal_state(state(material.output(name), STEPS), state(one_target, STEPS))


def test_one_seed_is_one_run_and_the_command_starts_its_own_ranks(material, one_target, tmp_path):
    """Also after a run that died before its first checkpoint, and with settings from a folder."""
    dead = (one_target / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    material.output("again").mkdir()
    (material.output("again") / "metrics.jsonl").write_text("".join(dead))
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nname: mine\n")
    mine = ["split=1t1d", "experiment=mine", "--config-dir", str(tmp_path)]
    ended = run(None, material.overrides("again", *mine))
    assert "\nmine: steps=6 loss=" in ended.output
    assert rows(material.output("again")) == rows(one_target)
    assert_equal_state(state(material.output("again"), STEPS), state(one_target, STEPS))


# Several drafter ranks.


@pytest.fixture(scope="session")
def uneven(material) -> Material:
    """The same text, tokenised, with the masks of some batches all but empty.

    Two batches a step. Batch 1 keeps two labels, batch 2 none, batches 6 and 7 (all of step 3) none.
    Rows like these cannot come out of text, so the masks are changed on disk.
    """
    settings = RenderSettings(enable_thinking=None, eos_ids=frozenset({258}), max_length=256)
    source, cache = str(material.folder / "train.jsonl"), material.folder / "uneven"
    written = prepare(source, build_tokenizer(), settings=settings, cache_dir=cache, max_bad_share=0.0)
    packing = make_packing(written)
    mask = np.fromfile(written.path / "loss_mask.bin", dtype=np.uint8)
    starts = np.concatenate([[0], np.cumsum(written.lengths)])
    for batch, num_kept in ((1, 3), (2, 1), (6, 0), (7, 1)):
        for document in packing.documents(batch):
            generated = starts[document] + np.flatnonzero(written.document(document)[1])
            mask[generated[num_kept:]] = 0
    mask.tofile(written.path / "loss_mask.bin")
    changed = Material(material.folder, cache)
    counts = num_candidates(changed)
    assert counts[2] == counts[6] == counts[7] == 0
    assert 0 < counts[1] < min(counts[k] for k in (0, 3, 4, 5, 8, 9, 10, 11)) / 5
    return changed


def make_packing(store: DocumentStore) -> Packing:
    return Packing(store.lengths, tokens_per_batch=TOKENS_PER_BATCH, batches_per_step=2, seed=0)


def num_candidates(material: Material) -> list[int]:
    """Possible anchors of each training batch, as the ranks will find them on disk."""
    (folder,) = (f for f in material.cache.iterdir() if f.is_dir())
    store = DocumentStore(folder)
    packing = make_packing(store)
    batches = [packed_batch(store, packing.documents(k), k) for k in range(2 * STEPS)]
    return [len(anchor_candidates(batch)) for batch in batches]


@pytest.fixture(scope="session")
def two_drafters(uneven) -> Path:
    """Two drafter ranks, one microbatch each; rows do not fall on the checkpoint."""
    split = ["split.targets=1", "split.drafters=2", "logging.every=2"]
    train(3, uneven.overrides("1t2d", *split))
    return uneven.output("1t2d")


def test_two_drafters_equal_one_with_two_microbatches(uneven, two_drafters):
    split = ["split=1t1d", "batches_per_step=2", "logging.every=2"]
    train(2, uneven.overrides("1t1d uneven", *split))
    one = uneven.output("1t1d uneven")
    for step in (3, 6):
        for name, alone in state(one, step).items():
            together = state(two_drafters, step)[name]
            scale = alone.abs().max().item()
            torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5 * scale, msg=name)
    for alone, together in zip(rows(one), rows(two_drafters), strict=True):
        assert together == pytest.approx(alone, rel=1e-4)


def test_saves_and_evaluations_are_no_time_of_steps(material):
    """A row is of steps before a save, a slow save, a slow evaluation, and steps after them."""
    pace = 0.2
    events = {(1, "save step", 2): partial(time.sleep, 2.0)}
    events |= {(1, "evaluate at step", 2): partial(time.sleep, 2.0)}
    more = ["steps=12", "checkpoint.every=2", "logging.every=4", "eval.every=6"]
    train(2, material.overrides("paused", "split=1t1d", *more), events, pace_s=pace)
    logged = [row for row in all_rows(material.output("paused")) if "train/loss" in row]
    assert [row["step"] for row in logged] == [4, 6, 8, 12]
    for row in logged:
        assert pace <= row["speed/step_s"] < 2 * pace, row
        assert row["wait/drafter"] <= row["speed/step_s"], row


# Going on.


def forget_after(folder: Path, step: int, copy: Path) -> Path:
    """The run as if it had been killed some time after a checkpoint: rows and a torn line remain."""
    shutil.copytree(folder, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name[-8:]) > step:
            shutil.rmtree(checkpoint)
    (copy / "checkpoints" / ".tmp-step_00000006").mkdir()
    shutil.rmtree(copy / "export")
    text = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(text[: text.rindex('"step": 6') + 30])
    return copy


def assert_same_run(resumed: Path, whole: Path) -> None:
    assert rows(resumed) == rows(whole)
    assert_equal_state(state(resumed, STEPS), state(whole, STEPS))
    exports = [(run / "export" / "model.safetensors").read_bytes() for run in (resumed, whole)]
    assert exports[0] == exports[1]
    assert {p.name for p in (resumed / "checkpoints").iterdir()} == {
        "step_00000003",
        "step_00000006",
    }


def test_resume_is_bit_exact_also_with_other_targets(material, one_target):
    copy = forget_after(one_target, 3, material.output("resumed"))
    outcomes = train(3, material.overrides("resumed", "split=2t1d"))
    assert f"going on from {copy}/checkpoints/step_00000003" in outcomes[0].output
    assert_same_run(copy, one_target)


REFUSED = {
    "older": (["resume={}"], ["resume={}, but "]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_on_is_refused_and_leaves_the_run_alone(material, one_target, case):
    words, expected = REFUSED[case]
    checkpoint = f"{one_target}/checkpoints/step_00000003"
    before = {p: p.read_bytes() for p in one_target.rglob("*") if p.is_file()}
    chosen = [text.format(checkpoint) for text in words]
    overrides = material.overrides(one_target.name, "split=1t1d", *chosen)
    outcomes = train(2, overrides, check=False)
    assert all(outcome.exit_code for outcome in outcomes), report(outcomes)
    output = "".join(outcome.output for outcome in outcomes)
    for text in expected:
        assert output.count(text.format(checkpoint)) == 1, output
    assert {p: p.read_bytes() for p in one_target.rglob("*") if p.is_file()} == before


# Sudden ends.


def endless(material, name: str, *more: str) -> list[str]:
    split = ["split.targets=1", "split.drafters=2", "steps=20000"]
    return material.overrides(name, *split, "checkpoint.every=0", "eval.every=0", *more)


def training(output: Path) -> Callable[[], bool]:
    """Whether some steps have been made."""
    metrics = output / "metrics.jsonl"
    return lambda: metrics.is_file() and metrics.read_text().count("train/loss") >= 3


def all_gone_within_10_s(command: Running, since: float) -> Ended:
    ended = command.wait(10)
    while command.pids():
        assert time.monotonic() - since < 10, ended.output
        time.sleep(0.05)
    return ended


def test_killed_rank_ends_all_and_is_named(material):
    """The processes that a rank has started itself go with it, such as wandb's."""
    with running(3, endless(material, "killed", "logging=offline")) as command:
        command.wait_until(training(material.output("killed")), 90)
        pid = min(command.pids(rank=1))  # wandb's process came later
        os.kill(pid, signal.SIGKILL)
        ended = all_gone_within_10_s(command, time.monotonic())
    assert ended.code != 0
    failure = json.loads((material.output("killed") / "failure.json").read_text())
    assert failure["cause"].startswith(f"rank 1 (drafter) died: its process {pid} is gone")


def test_killed_launcher_leaves_no_process(material):
    with running(3, endless(material, "no launcher")) as command:
        command.wait_until(training(material.output("no launcher")), 90)
        command.signal(signal.SIGKILL)
        all_gone_within_10_s(command, time.monotonic())
    failure = json.loads((material.output("no launcher") / "failure.json").read_text())
    assert "lost the job's store" in failure["cause"]


def test_signal_to_the_launcher_saves_and_finishes_wandb(material):
    """As Ctrl-C, a scheduler or a container's end do it: torchrun passes it on to all ranks."""
    output = material.output("terminated")
    with running(3, endless(material, "terminated", "logging=offline")) as command:
        command.wait_until(training(output), 90)
        command.signal(signal.SIGTERM)
        ended = command.wait(60)
        assert not command.pids()
    assert "SIGTERM at rank" in ended.output
    assert "of 20000 steps; the same command goes on" in ended.output
    (checkpoint,) = (output / "checkpoints").iterdir()
    last_row = rows(output)[-1]
    assert int(checkpoint.name[-8:]) == last_row["step"]
    (log,) = output.glob("wandb/offline-run-*/run-*.wandb")
    assert str(last_row["train/loss"]).encode() in log.read_bytes()
    assert "finishing run" in (log.parent / "logs" / "debug.log").read_text()
    assert not (output / "failure.json").exists()
    # The second part of an offline run bears the same id: synced in order, they are one run.
    events = {(1, "train step", 2): signal.SIGTERM}
    train(3, endless(material, "terminated", "logging=offline"), events, pace_s=0.1)
    parts = sorted(output.glob("wandb/offline-run-*/run-*.wandb"))
    assert [part.stem for part in parts] == [log.stem] * 2


def test_torchrun_starts_killed_ranks_anew_and_the_run_goes_on(material):
    """Also with resume=none, which means: anew in each launch, not in each restart."""
    more = ["steps=90", "checkpoint.every=10", "eval.every=45", "resume=none", "split=1t1d"]
    with running(2, material.overrides("restarted", *more), max_restarts=3) as command:
        metrics = material.output("restarted") / "metrics.jsonl"
        command.wait_until(lambda: metrics.is_file() and '"step": 25,' in metrics.read_text(), 90)
        os.kill(min(command.pids(rank=1)), signal.SIGKILL)
        ended = command.wait(90)
    assert ended.code == 0, ended.output
    assert "going on from" in ended.output
    train(2, material.overrides("not restarted", *more))
    assert rows(material.output("restarted")) == rows(material.output("not restarted"))
    states = [state(material.output(name), 90) for name in ("restarted", "not restarted")]
    assert_equal_state(*states)


# Settings that cannot work.


BAD = {
    "typo": ("optim.lr_=1e-3", "optim.lr_=1e-3 is no setting; did you mean optim.lr?"),
    "secret": ("data.path=s3://me:hunter2@bucket/x", "data.path=s3://***@bucket/x holds a credential"),
    "added": ("+unknown=1", "unknown=1 is no setting"),
    "added typo": ("+drafter.blocksize=8", "did you mean drafter.block_size?"),
    "no number": ("steps=many", "Value 'many' of type 'str' could not be converted to Integer"),
    "no choice": ("logging.wandb=on", "expected one of [online, offline, disabled]"),
    "bound": ("tokens_per_batch=1000", "tokens_per_batch=1000 must be a multiple of 128"),
    "combination": ("batches_per_step=4", "4 must be a multiple of split.drafters=3"),
    "colocated": (
        "split.colocated=true",
        "split.colocated=true needs split.targets=5 equal to split.drafters=3",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_setting_is_named_once_before_anything_is_loaded(case):
    override, expected = BAD[case]
    ended = run(None, [override], limit_s=30, code=None)
    assert ended.output.count(expected) == 1, ended.output
    assert "Traceback" not in ended.output
    assert ended.seconds < 30


@pytest.mark.parametrize(
    ("case", "late"), [("no number", 1), ("no number", 0), ("typo", 0), ("world size", 0)]
)
def test_ranks_that_find_the_same_problem_say_it_once(material, tmp_path, case, late):
    """Also if the other rank comes to it first: torchrun then ends both, said or not."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, time\ntime.sleep(1.0 if os.environ.get('RANK') == '{late}' else 0)\n"
    )
    override, expected = BAD.get(case, ("split=5t3d", "use split.targets=1 split.drafters=1"))
    overrides = material.overrides("bad", "split=1t1d", override)
    ended = run(2, overrides, limit_s=90, code=None, first_on_path=tmp_path)
    assert ended.output.count(expected) == 1, ended.output
    assert "exitcode  : 2 " in ended.output or case == "no number"  # Hydra's own code is 1
    assert ended.seconds < 60
    assert not list(material.output("bad").rglob("*"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("target.path=nowhere/target", "target.path='nowhere/target'"),
        ("data.path=nowhere.jsonl", "data.path=nowhere.jsonl: there is no such file"),
    ],
    ids=["no target", "no data"],
)
def test_what_rank_0_finds_before_weights_are_loaded_is_said_once(material, override, expected):
    overrides = material.overrides("bad", "split=1t1d", override)
    ended = run(2, overrides, limit_s=90, code=None)
    assert ended.output.count(expected) == 1, ended.output
    assert "is loaded" not in ended.output
    assert "in exit_on_error" not in ended.output, "a traceback says nothing about a setting"
    assert ended.seconds < 60
