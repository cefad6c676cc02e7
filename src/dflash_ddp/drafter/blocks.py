"""Anchors to blocks: what a drafter is asked, decided in host memory as a pure function of (batch, seed).

A block opens at an anchor `a`: slot 0 holds the anchor's own token, slots 1..B-1 hold the mask token, and slot k is
asked for the token at `a + k` (its own place, no shift). It may see the context features of its document strictly
before `a`, because at inference the target has not yet computed the newest token.

    position   ...  a-2  a-1 |  a    a+1   a+2  ...  a+B-1
    context     x    x    x  |
    block                    | tok   MASK  MASK ...  MASK
    label                    |  -    t_a+1 t_a+2 ... t_a+B-1

Shapes are static: `num_anchors` blocks whatever the text holds. Surplus blocks have `kept` False, see only
themselves and carry no label. Slots without a label never reach the head: `slots_R` lists those that do.
"""

from dataclasses import dataclass

import numpy as np

from dflash_ddp.batch import PackedBatch
from dflash_ddp.config import LossConfig, PositionWeight

ANCHOR_STREAM = 1  # separates the anchors' random numbers from those of the data order


@dataclass(frozen=True, slots=True)
class Blocks:
    """N blocks of B slots over one packed batch.

    Attributes:
        anchors_N: int32, place of the anchor in the packed batch, ascending; 0 where not kept.
        starts_N: int32, first token of the anchor's document; equal to the anchor where not kept.
        kept_N: bool, False for surplus blocks.
        anchor_ids_N: int32, the anchors' tokens.
        positions_NB: int32, positions inside the document, `a + k` for slot k.
        labels_NB: int64, the true token of each slot; 0 where unsupervised.
        supervised_NB: bool, slots that carry a label; never slot 0.
        weights_NB: float32, position weight of supervised slots, 0 elsewhere.
    """

    anchors_N: np.ndarray
    starts_N: np.ndarray
    kept_N: np.ndarray
    anchor_ids_N: np.ndarray
    positions_NB: np.ndarray
    labels_NB: np.ndarray
    supervised_NB: np.ndarray
    weights_NB: np.ndarray

    @property
    def block_size(self) -> int:
        """Slots of a block, B."""
        return self.labels_NB.shape[1]

    @property
    def slots_R(self) -> np.ndarray:
        """int64 [R]: supervised slots as indices into the N * (B-1) slots after slot 0."""
        return np.flatnonzero(self.supervised_NB[:, 1:])

    @property
    def weight_sum(self) -> float:
        """Sum of all position weights: this batch's share of the step's denominator."""
        return float(self.weights_NB.sum(dtype=np.float64))


def anchor_candidates(batch: PackedBatch) -> np.ndarray:
    """Places that may be anchors, ascending int64.

    An anchor is a generated token whose successor in the same document is generated too. Ends of
    answers count: their blocks are cut, so that the drafter learns to end.
    """
    mask = batch.loss_mask
    follows = batch.positions[1:] > 0
    return np.flatnonzero(mask[:-1] & mask[1:] & follows)


def sample_anchors(batch: PackedBatch, num_anchors: int, *, seed: int) -> np.ndarray:
    """At most `num_anchors` distinct anchors, uniform over the candidates, ascending.

    A pure function of (batch, seed): the generator is keyed by the batch's number.
    """
    candidates = anchor_candidates(batch)
    if len(candidates) <= num_anchors:
        return candidates
    key = np.random.SeedSequence([seed, ANCHOR_STREAM, batch.index])
    generator = np.random.Generator(np.random.PCG64(key))
    return np.sort(generator.choice(candidates, size=num_anchors, replace=False))


# Block sizes and their gamma: 8, 10 and 16 as published (arXiv 2602.06036); between and beyond, in proportion.
_GAMMA_SIZES, _GAMMAS = (0, 8, 10, 16, 128), (0, 4, 5, 7, 56)


def decay_gamma(loss: LossConfig, block_size: int) -> float | None:
    """The gamma of `position_weights`; None unless the setting is `decay`."""
    if loss.position_weight is not PositionWeight.decay:
        return None
    if loss.position_gamma is not None:
        return loss.position_gamma
    return float(np.interp(block_size, _GAMMA_SIZES, _GAMMAS))


def position_weights(block_size: int, gamma: float | None) -> np.ndarray:
    """float32 [B]: 0 for slot 0, then exp(-(k-1)/gamma); all ones without gamma.

    Early slots count more because a wrong one voids those after it.
    """
    weights = np.ones(block_size, dtype=np.float64)
    if gamma is not None:
        weights = np.exp(-(np.arange(block_size) - 1) / gamma)
    weights[0] = 0.0
    return weights.astype(np.float32)


def make_blocks(
    batch: PackedBatch,
    anchors: np.ndarray,
    *,
    num_anchors: int,
    block_size: int,
    gamma: float | None,
) -> Blocks:
    """Blocks at the given anchors, filled up to `num_anchors` with blocks that carry no label.

    A slot is supervised while every token of the block up to it lies in the anchor's document and
    was generated: a block never runs through a user turn into the next answer.
    """
    num_kept, num_tokens = len(anchors), batch.num_tokens
    anchors_N = np.zeros(num_anchors, dtype=np.int64)
    anchors_N[:num_kept] = anchors
    kept_N = np.arange(num_anchors) < num_kept
    slots_B = np.arange(block_size)
    places_NB = anchors_N[:, None] + slots_B
    inside_NB = places_NB < num_tokens
    places_NB = np.minimum(places_NB, num_tokens - 1)
    same_document_NB = inside_NB & (
        batch.positions[places_NB] == batch.positions[anchors_N][:, None] + slots_B
    )
    generated_NB = same_document_NB & batch.loss_mask[places_NB] & kept_N[:, None]
    supervised_NB = np.logical_and.accumulate(generated_NB, axis=1)
    supervised_NB[:, 0] = False
    positions_N = np.where(kept_N, batch.positions[anchors_N], 0)
    return Blocks(
        anchors_N=anchors_N.astype(np.int32),
        starts_N=(anchors_N - positions_N).astype(np.int32),
        kept_N=kept_N,
        anchor_ids_N=batch.input_ids[anchors_N].astype(np.int32),
        positions_NB=(positions_N[:, None] + slots_B).astype(np.int32),
        labels_NB=np.where(supervised_NB, batch.input_ids[places_NB], 0).astype(np.int64),
        supervised_NB=supervised_NB,
        weights_NB=np.where(supervised_NB, position_weights(block_size, gamma), np.float32(0)),
    )
