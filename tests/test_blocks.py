"""Anchors, labels and weights."""

import numpy as np
import pytest
from drafters import tiny_batch

from dflash_ddp.batch import PackedBatch
from dflash_ddp.config import LossConfig, PositionWeight
from dflash_ddp.drafter.blocks import (
    anchor_candidates,
    decay_gamma,
    make_blocks,
    position_weights,
    sample_anchors,
)


def batch_of(mask: str, lengths: tuple[int, ...] | None = None, index: int = 0) -> PackedBatch:
    """Tokens 100, 101, ...; '1' marks generated ones."""
    lengths = lengths or (len(mask),)
    return PackedBatch(
        index=index,
        input_ids=np.arange(100, 100 + len(mask), dtype=np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        loss_mask=np.array([c == "1" for c in mask]),
        document_lengths=np.array(lengths, dtype=np.int32),
        document_ids=np.arange(len(lengths)),
    )


def blocks_at(batch, anchors, num_anchors=4, size=4, gamma=None):
    return make_blocks(
        batch,
        np.array(anchors, dtype=np.int64),
        num_anchors=num_anchors,
        block_size=size,
        gamma=gamma,
    )


def test_candidates_need_a_generated_successor_in_the_same_document():
    assert anchor_candidates(batch_of("0011101")).tolist() == [2, 3]
    assert anchor_candidates(batch_of("011011", (3, 3))).tolist() == [1, 4]
    assert anchor_candidates(batch_of("011110", (3, 3))).tolist() == [1, 3]
    assert anchor_candidates(batch_of("0101")).tolist() == []


def test_anchors_are_valid_distinct_sorted_and_reach_every_candidate():
    batch = batch_of("00111110011110", (7, 7))
    candidates = set(anchor_candidates(batch).tolist())
    seen = set()
    for index in range(200):
        other = PackedBatch(index, *(getattr(batch, f) for f in batch.__slots__[1:]))
        anchors = sample_anchors(other, 3, seed=1).tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 3
        seen |= set(anchors)
    assert seen == candidates


@pytest.mark.parametrize("num_anchors", [1, 4, 5, 6])
def test_all_candidates_are_used_when_they_fit(num_anchors):
    batch = batch_of("0111110")
    assert len(sample_anchors(batch, num_anchors, seed=0)) == min(num_anchors, 4)


def test_anchors_are_a_function_of_seed_and_batch_number():
    batch = tiny_batch((400,), index=5)
    first = sample_anchors(batch, 10, seed=1)
    assert np.array_equal(first, sample_anchors(batch, 10, seed=1))
    assert not np.array_equal(first, sample_anchors(batch, 10, seed=2))
    assert not np.array_equal(first, sample_anchors(tiny_batch((400,), index=6), 10, seed=1))


def test_slot_k_is_asked_for_the_token_at_its_own_place():
    blocks = blocks_at(batch_of("0111111111"), [2, 5])
    assert blocks.anchor_ids_N.tolist()[:2] == [102, 105]
    assert blocks.labels_NB[0].tolist() == [0, 103, 104, 105]
    assert blocks.labels_NB[1].tolist() == [0, 106, 107, 108]
    assert blocks.positions_NB[1].tolist() == [5, 6, 7, 8]
    assert not blocks.supervised_NB[:, 0].any()


def test_labels_end_with_the_answer_the_document_and_the_batch():
    at_turn = blocks_at(batch_of("0111001111"), [2])
    assert at_turn.supervised_NB[0].tolist() == [False, True, False, False], (
        "stops at the user turn"
    )
    at_document = blocks_at(batch_of("01111111", (4, 4)), [2])
    assert at_document.supervised_NB[0].tolist() == [False, True, False, False]
    at_end = blocks_at(batch_of("01111111", (4, 4)), [6])
    assert at_end.supervised_NB[0].tolist() == [False, True, False, False]
    assert at_end.starts_N[0] == 4


def test_surplus_blocks_carry_nothing():
    for anchors in ([], [2]):
        blocks = blocks_at(batch_of("0111"), anchors)
        surplus = slice(len(anchors), None)
        assert not blocks.kept_N[surplus].any()
        assert not blocks.supervised_NB[surplus].any()
        assert (blocks.weights_NB[surplus] == 0).all()
        assert (blocks.starts_N[surplus] == blocks.anchors_N[surplus]).all(), "no context"
    assert blocks_at(batch_of("0111"), []).weight_sum == 0


def test_position_weights_of_the_paper():
    expected = [
        0,
        1,
        0.8669,
        0.7515,
        0.6514,
        0.5647,
        0.4895,
        0.4244,
        0.3679,
        0.3189,
        0.2765,
        0.2397,
        0.2077,
        0.1801,
        0.1561,
        0.1353,
    ]
    assert np.allclose(position_weights(16, 7.0), expected, atol=5e-5)
    assert position_weights(16, 7.0).sum() == pytest.approx(6.6306, abs=1e-3)
    assert position_weights(10, 5.0).sum() == pytest.approx(4.6048, abs=1e-3)
    assert position_weights(8, 4.0).sum() == pytest.approx(3.7352, abs=1e-3)
    assert position_weights(4, None).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(("size", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 2), (12, 17 / 3)])
def test_gamma_follows_the_block_size_unless_it_is_set(size, gamma):
    assert decay_gamma(LossConfig(), size) == pytest.approx(gamma)
    assert decay_gamma(LossConfig(position_gamma=3.0), size) == 3.0
    for other in (PositionWeight.uniform, PositionWeight.dpace):
        assert decay_gamma(LossConfig(position_weight=other, position_gamma=3.0), size) is None


def test_slots_and_weight_sum_agree_with_the_blocks():
    blocks = blocks_at(batch_of("0111111100"), [1, 3, 6], gamma=4.0)
    flat = blocks.supervised_NB[:, 1:].reshape(-1)
    assert blocks.slots_R.tolist() == np.flatnonzero(flat).tolist()
    assert blocks.weight_sum == pytest.approx(blocks.weights_NB.sum())
    assert (blocks.weights_NB > 0).sum() == len(blocks.slots_R)
