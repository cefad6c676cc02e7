"""The stream against one written out by hand, for every kind of split, evaluation and resume."""

import random

import numpy as np
import pytest

from dflash_ddp.schedule import Kind, Schedule, evaluation_steps


def test_evaluation_steps():
    assert evaluation_steps(10, every=4, at_start=True) == (0, 4, 8, 10)
    assert evaluation_steps(8, every=4, at_start=False) == (4, 8)
    assert evaluation_steps(5, every=0, at_start=True) == (0, 5)


def written_out(*, steps, per_step, drafters, heldout, eval_steps, first):
    stream = []
    for step in range(first, steps + 1):
        done_before = step == first and first > 0  # that evaluation came before the checkpoint
        if step in eval_steps and not done_before:
            stream += [(Kind.HELDOUT, h, h % drafters, step) for h in range(heldout)]
        if step < steps:
            stream += [
                (Kind.TRAIN, k, k % drafters, step)
                for k in range(step * per_step, (step + 1) * per_step)
            ]
    return stream


@pytest.mark.parametrize("seed", range(300))
def test_stream_equals_the_one_written_out(seed):
    draw = random.Random(seed)
    drafters, steps = draw.randint(1, 4), draw.randint(1, 9)
    per_step, heldout = drafters * draw.randint(1, 3), draw.randint(0, 5)
    eval_steps = evaluation_steps(steps, every=draw.randint(0, 4), at_start=draw.random() < 0.5)
    first = draw.randint(0, steps)
    schedule = Schedule(
        steps=steps,
        batches_per_step=per_step,
        num_drafters=drafters,
        num_heldout=heldout,
        eval_steps=eval_steps,
        first_step=first,
    )
    expected = written_out(
        steps=steps,
        per_step=per_step,
        drafters=drafters,
        heldout=heldout,
        eval_steps=eval_steps if heldout else (),
        first=first,
    )
    assert schedule.num_items == len(expected)
    counts = [0] * drafters
    for index, row in enumerate(expected):
        item = schedule.item(index)
        assert (item.kind, item.batch, item.drafter, item.step) == row
        assert schedule.route(index) == (item.drafter, counts[item.drafter])
        assert schedule.item_of(item.drafter, counts[item.drafter]) == index
        counts[item.drafter] += 1
    assert [schedule.item_of(d, counts[d]) for d in range(drafters)] == [None] * drafters
    for step in range(first, steps):
        batches = expected[schedule.first_item(step) :]
        assert batches[0] == (Kind.TRAIN, step * per_step, 0, step)
    assert schedule.first_item(steps) == len(expected)


def test_a_long_run_stays_small():
    schedule = Schedule(
        steps=100_000,
        batches_per_step=8,
        num_drafters=4,
        num_heldout=10,
        eval_steps=evaluation_steps(100_000, every=1000, at_start=True),
    )
    tables = [value for value in vars(schedule).values() if isinstance(value, np.ndarray)]
    assert sum(table.nbytes for table in tables + schedule._items) <= 13 * schedule.num_items
    assert schedule.first_item(100_000) == schedule.num_items == 100_000 * 8 + 101 * 10


def test_a_step_has_the_same_batches_whatever_the_split_and_wherever_it_resumes():
    def batches(step, **kwargs):
        schedule = Schedule(steps=6, batches_per_step=6, **kwargs)
        items = map(schedule.item, range(schedule.num_items))
        return [item.batch for item in items if item.step == step and item.kind is Kind.TRAIN]

    expected = list(range(24, 30))
    for drafters in (1, 2, 3, 6):
        for first in (0, 2, 4):
            found = batches(
                4, num_drafters=drafters, first_step=first, num_heldout=2, eval_steps=(2, 6)
            )
            assert found == expected
