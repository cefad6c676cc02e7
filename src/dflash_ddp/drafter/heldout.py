"""Held-out accept length inside a training run: the same features, the same drafter, an anchor at every place."""

import numpy as np
import torch
from torch import Tensor

from dflash_ddp.accept import AcceptTally, answer_spans, walk
from dflash_ddp.batch import PackedBatch
from dflash_ddp.drafter.blocks import make_blocks
from dflash_ddp.drafter.inputs import host_inputs, to_device
from dflash_ddp.drafter.metrics import right_slots
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.drafter.step import LossSettings, Tables, forward, without_gradient


@torch.no_grad()
def right_drafts(
    model: Drafter,
    tables: Tables,
    features_SC: Tensor,
    batch: PackedBatch,
    anchors: np.ndarray,
    *,
    num_anchors: int,
    loss: LossSettings,
    flex: bool,
) -> np.ndarray:
    """bool [anchors, B-1]: whether the drafter's greedy token equals the text's, slot by slot.

    Args:
        model: the bare drafter.
        tables: frozen tables.
        features_SC: context features [S, C].
        batch: the packed batch they belong to.
        anchors: ascending places, any number.
        num_anchors: N, blocks of one forward.
        loss: chunk size and functions; its recomputation plays no part.
        flex: by flex attention, compiled; else by the dense path.
    """
    parts = []
    plain = without_gradient(loss)
    for begin in range(0, len(anchors), num_anchors):
        chosen = anchors[begin : begin + num_anchors]
        blocks = make_blocks(
            batch, chosen, num_anchors=num_anchors, block_size=model.shape.block_size, gamma=None
        )
        host = host_inputs(
            batch,
            blocks,
            model.shape,
            context_length=len(features_SC),
            chunk_rows=loss.chunk_rows,
            flex=flex,
        )
        inputs = to_device(host, model.shape, features_SC.device)
        result = forward(model, tables, features_SC, inputs, loss=plain)
        parts.append(right_slots(result, inputs)[: len(chosen)].bool().cpu().numpy())
    return np.concatenate(parts)


def walk_batch(
    model: Drafter,
    tables: Tables,
    features_SC: Tensor,
    batch: PackedBatch,
    *,
    num_anchors: int,
    loss: LossSettings,
    flex: bool,
) -> list[list[int]]:
    """Walk every answer of a packed batch: for each document, the tokens of its target calls."""
    calls: list[list[int]] = [[] for _ in batch.document_lengths]
    spans = [span for span in answer_spans(batch) if span.end - span.first >= 2]
    if not spans:
        return calls
    anchors = np.concatenate([np.arange(span.first, span.end - 1) for span in spans])
    right = right_drafts(
        model, tables, features_SC, batch, anchors, num_anchors=num_anchors, loss=loss, flex=flex
    )
    row = 0
    for span in spans:
        calls[span.document] += walk(span, right[row:], span.first)
        row += span.end - 1 - span.first
    return calls


def tally_batch(
    model: Drafter,
    tables: Tables,
    features_SC: Tensor,
    batch: PackedBatch,
    *,
    num_anchors: int,
    loss: LossSettings,
) -> AcceptTally:
    """The walks of a packed batch, added up."""
    tally = AcceptTally.empty(model.shape.block_size)
    for calls in walk_batch(
        model,
        tables,
        features_SC,
        batch,
        num_anchors=num_anchors,
        loss=loss,
        flex=features_SC.is_cuda,
    ):
        tally.add(calls)
    return tally
