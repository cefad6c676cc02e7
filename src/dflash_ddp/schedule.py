"""The stream of a run: which packed batch goes to which drafter rank, in which order. Pure.

    step          0                  1                  2          ...   `steps`
    stream   | h0 h1 | k0 k1 k2 | k3 k4 k5 | h0 h1 | k6 k7 k8 | ...  | h0 h1 |
    drafter  |  0  1 |  0  1  2 |  0  1  2 |  0  1 |  0  1  2 |      |  0  1 |

Training batches k come in order, `batches_per_step` to a step; batch k goes to drafter k % D. Before the steps in
`eval_steps` stand the held-out batches h. Which *target* rank computes an item is decided at run time by a ticket
and changes nothing. So training is a function of the schedule, and resuming is one integer: the next step.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np


class Kind(Enum):
    """What an item of the stream is for."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True)
class StreamItem:
    """One packed batch at its place in the stream.

    Attributes:
        index: place in the stream.
        kind: training or held-out.
        batch: number of the training batch k, or of the held-out batch h.
        drafter: ordinal of the drafter rank that takes it.
        step: optimizer steps that are complete before it.
    """

    index: int
    kind: Kind
    batch: int
    drafter: int
    step: int


def evaluation_steps(steps: int, *, every: int, at_start: bool) -> tuple[int, ...]:
    """Steps before which held-out text is evaluated, ascending; always the last one."""
    due = {0} if at_start else set()
    if every:
        due |= set(range(every, steps, every))
    return tuple(sorted(due | {steps}))


class Schedule:
    """The stream of one run; every rank evaluates the same one."""

    def __init__(
        self,
        *,
        steps: int,
        batches_per_step: int,
        num_drafters: int,
        num_heldout: int = 0,
        eval_steps: tuple[int, ...] = (),
        first_step: int = 0,
    ) -> None:
        """A stream that starts with the training batches of `first_step`.

        Args:
            steps: optimizer steps of the whole run.
            batches_per_step: training batches of a step; a multiple of `num_drafters`.
            num_drafters: D.
            num_heldout: held-out batches of one evaluation.
            eval_steps: steps before which they come, ascending, each in 0..steps.
            first_step: resume here; an evaluation at that very step has been made already.
        """
        assert batches_per_step % num_drafters == 0
        self.num_drafters, self.num_heldout = num_drafters, num_heldout
        last_made = first_step if first_step > 0 else -1
        due = [step for step in eval_steps if step > last_made and num_heldout]
        self.eval_steps = frozenset(due)
        """Steps before which held-out batches come in this stream."""
        # int32: 13 bytes an item are kept, so that ten million items take 130 MB.
        train = np.arange(first_step * batches_per_step, steps * batches_per_step, dtype=np.int32)
        heldout = np.tile(np.arange(num_heldout, dtype=np.int32), len(due))
        step_of_heldout = np.repeat(np.array(due, dtype=np.int32), num_heldout)
        step = np.concatenate([step_of_heldout, train // batches_per_step])
        order = np.argsort(step, kind="stable")  # so a step's held-out batches come first
        self._step, self._batch = step[order], np.concatenate([heldout, train])[order]
        self._is_heldout = order < len(heldout)
        drafter = self._batch % num_drafters
        self._items = [np.flatnonzero(drafter == d).astype(np.int32) for d in range(num_drafters)]

    @property
    def num_items(self) -> int:
        """Items of the stream."""
        return len(self._step)

    def item(self, index: int) -> StreamItem:
        """The item at a place of the stream, 0 <= index < num_items."""
        kind = Kind.HELDOUT if self._is_heldout[index] else Kind.TRAIN
        batch = int(self._batch[index])
        return StreamItem(index, kind, batch, batch % self.num_drafters, int(self._step[index]))

    def first_item(self, step: int) -> int:
        """Place of the first training batch of a step: behind the evaluation before it."""
        before = int(np.searchsorted(self._step, np.int32(step)))
        return before + (self.num_heldout if step in self.eval_steps else 0)

    def route(self, index: int) -> tuple[int, int]:
        """(drafter ordinal, how many items that drafter takes before this one)."""
        drafter = int(self._batch[index]) % self.num_drafters
        # np.int32: with a Python int, numpy would first copy the whole table as int64.
        return drafter, int(np.searchsorted(self._items[drafter], np.int32(index)))

    def item_of(self, drafter: int, sequence: int) -> int | None:
        """Place in the stream of a drafter's `sequence`-th item, or None after its last."""
        items = self._items[drafter]
        return int(items[sequence]) if sequence < len(items) else None
