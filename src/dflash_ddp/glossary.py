"""Every number that a run logs: key, unit, meaning, and which way is better. Defined here and nowhere else.

The console, wandb's panels, `report.html` and docs/metrics.md read this table; a test compares it with what runs log.
The part of a key before the slash is its group, and its section in wandb's workspace.
"""

import re
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """One number; `k` in a key stands for a slot of the block. `best` is wandb's summary: max, min, last."""

    key: str
    unit: str
    best: str
    meaning: str


_TABLE = """
step | steps | last | optimizer steps that are complete
tokens | tokens | last | context tokens trained on since step 0, over all ranks
train/loss | nats | min | position-weighted mean cross-entropy of the supervised slots; loss=dpace: over their number
train/accuracy | share | max | supervised slots whose argmax is right
train/accept_length | tokens | max | teacher-forced: 1 + leading run of right slots, over wholly supervised blocks
train/slot_k | share | last | supervised slots k whose argmax is right
heldout/accept_length | tokens | max | exact greedy accept length on held-out text: mean tokens of a target call
heldout/walk_on_text | tokens | max | the same walk where answers are not the target's own; not an accept length
heldout/standard_error | tokens | last | its standard error, over documents
heldout/documents | documents | last | held-out documents measured
heldout/length_k | share | last | blocks that gave k tokens, the target's own included
heldout/slot_k | share | last | how often slot k is accepted, given that the slots before it were
optim/lr | 1 | last | learning rate of the step
optim/grad_norm | 1 | last | global gradient norm before the clip
optim/bad_steps | steps | last | steps skipped so far because of a loss or gradient that is not finite
checkpoint/stall_s | s | last | seconds that the last checkpoint held training up
checkpoint/write_s | s | last | seconds that writing it took, beside training
checkpoint/failed | checkpoints | last | checkpoints that could not be written so far
speed/tokens_per_s | tokens/s | max | context tokens trained on a second, all ranks
speed/step_s | s | min | seconds a step, without evaluation and checkpoints
speed/mfu_target | share | max | operations of the captured layers over the vendor's dense bf16 rate of all target ranks
speed/mfu_drafter | share | max | the same for the drafter's forward and backward; both on known GPUs only
wait/target | s | last | mean seconds a step that a target rank waited for a free slot
wait/drafter | s | last | mean seconds a step that a drafter rank waited for features
wait/target_share | share | last | the same as a share of the step: above 0.2 for long, the drafters are too slow
wait/drafter_share | share | last | the same as a share of the step: above 0.2 for long, the targets are too slow
channel/slots_full | slots | last | feature batches that lay ready when the first drafter rank last asked for one
memory/target_gib | GiB | last | most memory allocated so far on a target rank
memory/drafter_gib | GiB | last | most memory allocated so far on the first drafter rank
"""
METRICS = tuple(Metric(*line.split(" | ")) for line in _TABLE.strip().splitlines())
_BY_KEY = {metric.key: metric for metric in METRICS}


def find(key: str) -> Metric | None:
    """The metric of a row's key; `train/slot_3` is `train/slot_k`."""
    return _BY_KEY.get(re.sub(r"_\d+$", "_k", key))


def define(run: Any) -> None:
    """Tell a wandb run what it will see: the step as x axis, the best value as summary."""
    run.define_metric("step", hidden=True)
    for metric in METRICS[1:]:
        name = re.sub("_k$", "_*", metric.key)
        summary = None if name.endswith("*") else metric.best  # wandb has no summary of globs
        run.define_metric(name, step_metric="step", summary=summary)


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = ["| key | unit | meaning |", "|---|---|---|"]
    lines += [f"| `{m.key}` | {m.unit} | {m.meaning} |" for m in METRICS]
    return "\n".join(lines) + "\n"
