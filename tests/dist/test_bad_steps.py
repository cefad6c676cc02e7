"""A loss or gradient that is not finite: left out on all ranks alike, reported, and too many end the run."""

import gc
import json
import sys
import zlib
from functools import partial

import pytest
import torch
from ranks import report
from runs import rows, state
from training import poison, train

from dflash_ddp.drafter.worker import DrafterWorker

pytestmark = pytest.mark.dist

SPLIT = "split.targets=1 split.drafters=2 batches_per_step=4 checkpoint.every=0".split()
TARGET, FIRST, SECOND = range(3)


def tell_weights() -> None:
    """Write a checksum of this rank's masters and moments to its output."""
    (worker,) = (x for x in gc.get_objects() if isinstance(x, DrafterWorker))
    crc = 0
    for parameter in worker.model.parameters():
        moments = worker.optimizer.state[parameter]
        for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
            assert torch.isfinite(tensor).all()
            crc = zlib.crc32(tensor.numpy().tobytes(), crc)
    sys.stderr.write(f"weights {crc:08x}\n")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_one_bad_batch_on_one_rank_leaves_the_step_out_on_all(material, value):
    output = material.output(f"bad {value}")
    events = {(SECOND, "train step", 3): partial(poison, float(value), 1)}
    events |= {(rank, "evaluate at step 6", 1): tell_weights for rank in (FIRST, SECOND)}
    outcomes = train(3, material.overrides(output.name, *SPLIT, "max_hours=1"), events)
    said = {o.output.partition("weights ")[2][:8] for o in outcomes if o.rank != TARGET}
    assert len(said) == 1, report(outcomes)
    assert state(output, 6)["adamw_steps"].item() == 5
    trained = [row for row in rows(output) if "train/accuracy" in row or "optim/bad_steps" in row]
    assert [row["optim/bad_steps"] for row in trained] == [0, 0, 1, 1, 1, 1]
    assert "train/loss" not in trained[2]
    assert all("train/loss" in row for i, row in enumerate(trained) if i != 2)
    assert trained[2]["tokens"] == trained[1]["tokens"], "tokens of a step left out are not trained"
    assert "step 3: loss or gradient is not finite" in outcomes[FIRST].output, report(outcomes)
    record = json.loads((output / "bad_steps" / f"step_00000003_rank_{SECOND}.json").read_text())
    first, second = record["batches"]
    assert (first["batch"], second["batch"]) == (9, 11)
    assert first["loss"] == "nan"
    assert second["loss"] not in ("nan", "inf")
    assert len(first["documents"]) == len(first["rows"]) > 0
    assert all("train.jsonl:" in row for row in first["rows"])
    assert not (output / "bad_steps" / f"step_00000002_rank_{SECOND}.json").exists()


def test_what_a_bad_batch_leaves_in_its_slot_spoils_no_later_one(material):
    """A colocated rank has one slot, and later batches fill less of it."""
    split = ["split=colocated", "split.targets=1", "split.drafters=1", "batches_per_step=4"]
    events = {(0, "train step", 2): partial(poison, float("nan"), 4)}
    train(1, material.overrides("bad slot", *split), events)
    assert state(material.output("bad slot"), 6)["adamw_steps"].item() == 5


def test_too_many_in_a_row_end_the_run(material):
    output = material.output("bad all")
    events = {(SECOND, "train step", 2): partial(poison, float("nan"), 10**9)}
    overrides = material.overrides(output.name, *SPLIT, "optim.max_bad_steps=3")
    outcomes = train(3, overrides, events, check=False)
    assert {outcome.exit_code for outcome in outcomes} == {13}, report(outcomes)
    cause = json.loads((output / "failure.json").read_text())["cause"]
    assert "step 4: loss or gradient is not finite" in cause
    assert "optim.max_bad_steps=3" in cause
