"""Packing as a pure function: every document once an epoch, whole, in batches of like cost."""

import random
import time

import numpy as np
import pytest

from dflash_ddp.data import packing as packing_module
from dflash_ddp.data.packing import Packing, packed_batch

BUDGET = 4096


def typical_lengths(num_documents: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(6.3, 0.8, num_documents), 2, BUDGET).astype(np.int32)


LENGTHS = {
    "typical": typical_lengths(3000),
    "short": np.random.default_rng(1).integers(2, 60, 3000),
    "long": np.random.default_rng(2).integers(BUDGET // 2, BUDGET + 1, 500),
    "full": np.full(50, BUDGET),
    "two kinds": np.array([10, 3000] * 300),
    "few": np.array([5, 9, 7]),
    "one": np.array([17]),
}


def make(lengths, *, batches_per_step=8, seed=0, **options) -> Packing:
    return Packing(
        lengths, tokens_per_batch=BUDGET, batches_per_step=batches_per_step, seed=seed, **options
    )


def costs_of(lengths, packing, num_batches) -> np.ndarray:
    chosen = np.asarray(lengths, dtype=np.int64)
    costs = chosen * (packing_module.LINEAR_COST + chosen)
    return np.array([costs[packing.documents(batch)].sum() for batch in range(num_batches)])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batches_per_step", [1, 3, 8, 1000])
@pytest.mark.parametrize("kind", LENGTHS)
def test_each_document_once_an_epoch_and_the_budget_kept(kind, batches_per_step, shuffle):
    lengths = LENGTHS[kind]
    packing = make(lengths, batches_per_step=batches_per_step, shuffle=shuffle)
    batch = 0
    for epoch in range(3):
        seen = []
        for _ in range(packing.num_batches_per_epoch(epoch)):
            assert packing.epoch(batch) == epoch
            documents = packing.documents(batch)
            assert documents.dtype == np.int64
            assert 0 < lengths[documents].sum() <= BUDGET
            seen.append(documents)
            batch += 1
        assert np.sort(np.concatenate(seen)).tolist() == list(range(len(lengths)))
        if not shuffle:
            assert np.concatenate(seen).tolist() == list(range(len(lengths)))


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pure_function_of_the_batch_number(kind, shuffle):
    """Any order of questions, on any instance, gives the same answers."""
    lengths = LENGTHS[kind]
    forward = make(lengths, shuffle=shuffle)
    num_batches = sum(forward.num_batches_per_epoch(epoch) for epoch in range(4))
    expected = [forward.documents(batch).tolist() for batch in range(num_batches)]
    order = list(range(num_batches)) + random.Random(0).choices(range(num_batches), k=40)
    random.Random(1).shuffle(order)
    asked = make(lengths, shuffle=shuffle)
    for batch in order[:200]:
        assert asked.documents(batch).tolist() == expected[batch]
    resumed = make(lengths.astype(np.int64).tolist(), shuffle=shuffle)
    assert resumed.documents(num_batches - 1).tolist() == expected[-1]
    assert resumed.num_batches_per_epoch(0) == forward.num_batches_per_epoch(0)


def test_seeds_and_epochs_give_other_orders():
    lengths = LENGTHS["typical"]
    packing = make(lengths)
    first = packing.num_batches_per_epoch(0)
    epochs = [{tuple(packing.documents(k)) for k in range(a, a + 100)} for a in (0, first)]
    other = {tuple(make(lengths, seed=1).documents(k)) for k in range(100)}
    assert not epochs[0] & epochs[1]
    assert not epochs[0] & other


def test_known_answer():
    """A change of the sequence breaks resumed runs, so it must be on purpose."""
    packing = Packing(np.arange(1, 13), tokens_per_batch=20, batches_per_step=2, seed=7)
    batches = [packing.documents(batch).tolist() for batch in range(6)]
    assert batches == [[5, 4, 3, 1, 0], [9, 6, 2], [11, 7], [10, 8], [9, 6, 2], [5, 4, 3, 1, 0]]


@pytest.mark.parametrize("kind", ["typical", "short"])
def test_fill(kind):
    num_batches = make(LENGTHS[kind]).num_batches_per_epoch(0)
    assert LENGTHS[kind].sum() / (num_batches * BUDGET) > 0.95


@pytest.mark.parametrize("batches_per_step", [4, 24])
def test_batches_of_a_step_cost_alike(batches_per_step, monkeypatch):
    """Spread inside a step, against the same batches in random steps, over several epochs."""
    monkeypatch.setattr(packing_module, "LINEAR_COST", 2000)
    lengths = typical_lengths(2500)
    packing = make(lengths, batches_per_step=batches_per_step)
    epochs = [packing.num_batches_per_epoch(epoch) for epoch in range(6)]
    assert any(num_batches % batches_per_step for num_batches in epochs)  # steps cross the borders
    costs = costs_of(lengths, packing, sum(epochs) // batches_per_step * batches_per_step)

    def waste(values):
        steps = values.reshape(-1, batches_per_step)
        return (1 - steps.mean(axis=1) / steps.max(axis=1)).mean()

    shuffled = np.random.default_rng(0).permutation(costs)
    assert waste(costs) < 0.15 * waste(shuffled)


def test_steps_come_in_random_order():
    """Cost must not rise or fall through an epoch, nor inside a step."""
    lengths = typical_lengths(20_000)
    packing = make(lengths, batches_per_step=8)
    steps = costs_of(lengths, packing, packing.num_batches_per_epoch(0) // 8 * 8).reshape(-1, 8)
    assert abs(np.corrcoef(np.arange(len(steps)), steps.mean(axis=1))[0, 1]) < 0.2
    ranks = steps.argsort(axis=1).argsort(axis=1).mean(axis=0)
    assert np.abs(ranks - 3.5).max() < 0.8


def test_speed():
    lengths = typical_lengths(200_000)
    packing = make(lengths)
    start_s = time.process_time()
    packing.num_batches_per_epoch(0)
    assert time.process_time() - start_s < 4  # a million documents in 20 s on a slow, shared core


def test_misfits_are_named():
    with pytest.raises(ValueError, match="no documents"):
        make([])
    for shuffle in (True, False):
        with pytest.raises(ValueError, match=f"document 1 has {BUDGET + 1} tokens"):
            make([5, BUDGET + 1], shuffle=shuffle)


class Documents:
    """A store in memory."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths, dtype=np.int32)

    def document(self, number):
        ids = np.arange(self.lengths[number], dtype=np.int32) + 100 * number
        return ids, ids % 2 == 0


def test_packed_batch():
    batch = packed_batch(Documents([3, 2, 4]), np.array([2, 0]), 5)
    assert batch.index == 5
    assert batch.num_tokens == 7
    assert batch.input_ids.tolist() == [200, 201, 202, 203, 0, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.loss_mask.tolist() == [True, False, True, False, True, False, True]
    assert batch.document_lengths.tolist() == [4, 3]
    assert batch.document_ids.tolist() == [2, 0]
    types = [batch.input_ids, batch.positions, batch.loss_mask, batch.document_lengths]
    assert [array.dtype for array in types] == [np.int32, np.int32, bool, np.int32]
    assert batch.document_ids.dtype == np.int64
    assert batch.digest() == packed_batch(Documents([3, 2, 4]), [2, 0], 6).digest()
