"""Held-out accept length inside a training run: the same features, the same drafter, an anchor at every place."""

import numpy as np
import torch
from torch import Tensor

from dflash_ddp.accept import answer_spans, walk
from dflash_ddp.batch import PackedBatch
from dflash_ddp.drafter.blocks import make_blocks
from dflash_ddp.drafter.inputs import host_inputs, to_device
from dflash_ddp.drafter.metrics import right_slots
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.drafter.step import LossSettings, Tables, forward, without_gradient


@torch.no_grad()
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
    """Walk every answer of a packed batch: for each document, the tokens of its target calls.

    Args:
        model: the bare drafter.
        tables: frozen tables.
        features_SC: context features [S, C].
        batch: the packed batch they belong to.
        num_anchors: N, blocks of one forward.
        loss: chunk size and functions; its recomputation plays no part.
        flex: by flex attention, compiled; else by the dense path.
    """
    calls: list[list[int]] = [[] for _ in batch.document_lengths]
    spans = [span for span in answer_spans(batch) if span.end - span.first >= 2]
    anchors = [place for span in spans for place in range(span.first, span.end - 1)]
    plain, right = without_gradient(loss), []
    for begin in range(0, len(anchors), num_anchors):
        chosen = np.array(anchors[begin : begin + num_anchors])
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
        right += right_slots(result, inputs)[: len(chosen)].bool().tolist()
    row = 0
    for span in spans:
        end = row + span.end - 1 - span.first
        calls[span.document] += walk(span, np.array(right[row:end]))
        row = end
    return calls
