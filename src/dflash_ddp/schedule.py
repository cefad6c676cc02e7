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
        self.steps, self.first_step = steps, first_step
        self.batches_per_step, self.num_drafters = batches_per_step, num_drafters
        self.num_heldout = num_heldout
        later = first_step - 1 if first_step == 0 else first_step
        due = [s for s in eval_steps if s > later] if num_heldout else []
        self.eval_steps = frozenset(due)
        # evaluations_before[s]: evaluations that come before step s's own
        marks = np.zeros(steps + 2, dtype=np.int64)
        marks[np.array(due, dtype=np.int64) + 1] = 1
        self._evaluations_before = np.cumsum(marks)[: steps + 1]
        self._starts = self._counts(batches_per_step, num_heldout)
        per_drafter = batches_per_step // num_drafters
        self._drafter_starts = {
            share: self._counts(per_drafter, share)
            for share in {self._heldout_share(d) for d in range(num_drafters)}
        }

    def _counts(self, per_step: int, per_evaluation: int) -> np.ndarray:
        """Items before each step 0..steps, given how many a step and an evaluation have."""
        trained = np.maximum(np.arange(self.steps + 1) - self.first_step, 0)
        return trained * per_step + self._evaluations_before * per_evaluation

    @property
    def num_items(self) -> int:
        """Items of the stream."""
        return int(self._starts[-1]) + self._heldout_at(self.steps)

    def _heldout_at(self, step: int) -> int:
        return self.num_heldout if step in self.eval_steps else 0

    def item(self, index: int) -> StreamItem:
        """The item at a place of the stream, 0 <= index < num_items."""
        step = self._step_of(self._starts, index)
        within = index - int(self._starts[step])
        num_heldout = self._heldout_at(step)
        if within < num_heldout:
            return StreamItem(index, Kind.HELDOUT, within, within % self.num_drafters, step)
        batch = step * self.batches_per_step + within - num_heldout
        return StreamItem(index, Kind.TRAIN, batch, batch % self.num_drafters, step)

    def first_item(self, step: int) -> int:
        """Place of the first training batch of a step: behind the evaluation before it."""
        return int(self._starts[step]) + self._heldout_at(step)

    def _step_of(self, starts: np.ndarray, index: int) -> int:
        # side="right" passes over steps before first_step, which have no items.
        return int(np.searchsorted(starts, index, side="right")) - 1

    def _heldout_share(self, drafter: int) -> int:
        return len(range(drafter, self.num_heldout, self.num_drafters))

    def route(self, index: int) -> tuple[int, int]:
        """(drafter ordinal, how many items that drafter takes before this one)."""
        item = self.item(index)
        share = self._heldout_share(item.drafter)
        per_step = self.batches_per_step // self.num_drafters
        before = max(item.step - self.first_step, 0) * per_step
        before += int(self._evaluations_before[item.step]) * share
        if item.kind is Kind.HELDOUT:
            return item.drafter, before + item.batch // self.num_drafters
        before += share if item.step in self.eval_steps else 0
        return item.drafter, before + item.batch % self.batches_per_step // self.num_drafters

    def num_items_of(self, drafter: int) -> int:
        """Items that a drafter takes in all."""
        share = self._heldout_share(drafter)
        trained = (self.steps - self.first_step) * (self.batches_per_step // self.num_drafters)
        return trained + len(self.eval_steps) * share

    def item_of(self, drafter: int, sequence: int) -> int:
        """Place in the stream of a drafter's `sequence`-th item: the inverse of `route`."""
        share = self._heldout_share(drafter)
        starts = self._drafter_starts[share]
        step = self._step_of(starts, sequence)
        within = sequence - int(starts[step])
        first = int(self._starts[step])
        num_heldout = self._heldout_at(step)
        if num_heldout and within < share:
            return first + drafter + within * self.num_drafters
        within -= share if num_heldout else 0
        return first + num_heldout + drafter + within * self.num_drafters
