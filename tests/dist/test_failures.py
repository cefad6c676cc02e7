"""Every role killed, frozen, out of memory or slow: the others end in bounded time, and say and write why."""

import json
import os
import re
import signal
import time

import pytest
import torch
from ranks import Outcome, report
from training import die, train

import dflash_ddp.channel
import dflash_ddp.drafter.saving
import dflash_ddp.profiling
from dflash_ddp.target.capture import Target

pytestmark = pytest.mark.dist

# Ranks 0 and 1 are targets, 2 and 3 drafters; 2 is the one that saves.
RUN = ["split.targets=2", "split.drafters=2", "steps=300", "eval.every=0", "checkpoint.every=4"]


def failure(material, name: str) -> dict:
    return json.loads((material.output(name) / "failure.json").read_text())


def assert_all_end(outcomes: list[Outcome], within_s: float, *, but: int) -> None:
    """All ranks but one exit with code 13 within a time after what happened."""
    (at,) = (float(t) for o in outcomes for t in re.findall(r"happens at ([\d.]+)", o.output))
    for outcome in outcomes:
        if outcome.rank != but:
            assert outcome.exit_code == 13, report(outcomes)
            assert outcome.ended_at - at < within_s, report(outcomes)


KILLED = {
    "target": (1, "forward item"),
    "first target": (0, "forward item"),
    "drafter": (3, "train step"),
    "drafter that saves": (2, "save step"),
    "drafter in an evaluation": (3, "evaluate"),
    "target that connects": (0, "connect"),
}


@pytest.mark.parametrize("case", KILLED)
def test_killed(material, case):
    rank, words = KILLED[case]
    name = f"killed {case}"
    events = {(rank, words, 2 if words == "train step" else 1): die}
    outcomes = train(4, material.overrides(name, *RUN), events, check=False, pace_s=0.05)
    assert_all_end(outcomes, 10, but=rank)
    assert outcomes[rank].exit_code == -signal.SIGKILL
    role = "target" if rank < 2 else "drafter"
    if words != "connect":  # the run had its folder
        found = failure(material, name)
        assert found["cause"].startswith(f"rank {rank} ({role}) died: its process "), found
        assert len(found["phases"]) == 4
        assert found["phases"][f"rank {rank} ({role})"].startswith(words), found
    text = "".join(outcome.output for outcome in outcomes)
    assert f"the job ends: rank {rank} ({role}) died" in text, report(outcomes)
    assert words == "connect" or text.count("the others then: rank ") == 1


@pytest.mark.parametrize("store_there", [False, True])
def test_frozen(material, store_there):
    """A rank that stands still, also one that holds the job's store: then nobody gets an answer."""
    rank, name = (0 if store_there else 3), f"frozen {store_there}"
    words = "forward item" if store_there else "train step"
    outcomes = train(
        4,
        material.overrides(name, *RUN, "heartbeat_timeout_s=4"),
        {(rank, words, 4): signal.SIGSTOP},
        check=False,
        may_hang=[rank],
        store_in_rank0=store_there,
        pace_s=0.05,
    )
    assert_all_end(outcomes, 4 + 6, but=rank)
    expected = "has not answered for" if store_there else "rank 3 (drafter) has no heartbeat for 4 s"
    assert expected in failure(material, name)["cause"]


def break_rotation() -> None:
    def rotate(*_args: object, **_kwargs: object) -> None:
        raise ValueError("the dog ate it")

    dflash_ddp.drafter.saving.rotate = rotate


def oom_without_advice() -> None:
    """Memory runs out where nothing can be written: the first cause must be told all the same."""

    def out_of_memory(*_args: object) -> str:
        raise OSError("no space left")

    dflash_ddp.profiling.out_of_memory = out_of_memory
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


@pytest.mark.parametrize(
    ("event", "rank", "words", "cause"),
    [
        ("oom", 0, "forward item", "rank 0 (target) failed in phase 'forward item 4': OutOfMemoryError"),
        ("oom", 2, "train step", "rank 2 (drafter) failed in phase 'train step 3': OutOfMemoryError"),
        (oom_without_advice, 2, "train step", "'train step 3': OutOfMemoryError"),
        ("raise", 3, "train step", "rank 3 (drafter) failed in phase 'train step 3': ValueError: the dog"),
        (break_rotation, 2, "train step", "ValueError: the dog ate it"),
    ],
    ids=[
        "out of memory, target",
        "out of memory, drafter",
        "out of memory, no advice",
        "error",
        "error in the saving thread",
    ],
)
def test_error_of_any_rank_and_thread(material, event, rank, words, cause):
    name = f"error {rank} {getattr(event, '__name__', event)}"
    outcomes = train(
        4, material.overrides(name, *RUN), {(rank, words, 4): event}, check=False, pace_s=0.05
    )
    assert_all_end(outcomes, 10, but=-1)
    found = failure(material, name)
    wanted = cause if words == "train step" else cause.partition(" 4'")[0]
    assert wanted in found["cause"], found
    assert "Traceback" in found["trace"] or "line" in found["trace"]


def slow_forward() -> None:
    """This target takes very much longer than the others."""
    dflash_ddp.channel.REPORT_EVERY_S = 0.3
    forward = Target.features

    def features(self: Target, *args: object) -> None:
        time.sleep(2.5)
        forward(self, *args)

    Target.features = features


def report_soon() -> None:
    dflash_ddp.channel.REPORT_EVERY_S = 0.3


def test_a_slow_target_is_waited_for_and_named(material):
    events = {(0, "load target", 1): slow_forward, (2, "evaluate", 1): report_soon}
    events[3, "evaluate", 1] = report_soon
    overrides = material.overrides("slow", *RUN, "steps=4", "heartbeat_timeout_s=4")
    outcomes = train(4, overrides, events)
    text = outcomes[2].output + outcomes[3].output
    waits = re.findall(r"waiting \d+ s for item \d+ \((.*)\)", text)
    assert any("rank 0 (target): forward item" in wait for wait in waits), report(outcomes)
    assert not (material.output("slow") / "failure.json").exists()
