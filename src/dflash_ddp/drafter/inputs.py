"""From a packed batch and its blocks to what the drafter's step takes: static shapes, one way, no questions back.

Everything is decided on the host (`HostInputs`, numpy) and copied to the device without waiting (`Inputs`). The
number of supervised slots stays known on the host, so the loss can stop after the last chunk that holds one.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_ddp.batch import PackedBatch
from dflash_ddp.drafter.attention import (
    block_mask,
    dense_mask,
    find_tiles,
    mask_function,
)
from dflash_ddp.drafter.blocks import Blocks
from dflash_ddp.drafter.loss import Rows
from dflash_ddp.drafter.model import DrafterShape

ALIGNMENT = 128  # bytes; compiled kernels want 16


@dataclass(frozen=True, slots=True)
class HostInputs:
    """One microbatch in host memory.

    Attributes:
        arrays: name -> array; see `Inputs` for names and shapes.
        tiles: kind of layer -> `find_tiles` of its mask; empty for dense attention.
        num_chunks: loss chunks that hold a supervised slot.
        weight_sum: sum of position weights.
        num_tokens: real tokens of the packed batch.
    """

    arrays: dict[str, np.ndarray]
    tiles: dict[str, np.ndarray]
    num_chunks: int
    weight_sum: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """One microbatch on the device.

    Attributes:
        token_ids_X: int64 [N + 1], the anchors' tokens and the mask token.
        positions_T: int32 [S + Q], positions inside documents of context and slots.
        rows: the supervised slots, for the loss.
        supervised_NB: bool [N, B-1], slots 1..B-1 that carry a label.
        masks: kind of layer -> BlockMask or dense mask.
    """

    token_ids_X: Tensor
    positions_T: Tensor
    rows: Rows
    supervised_NB: Tensor
    masks: dict[str, BlockMask | Tensor]


def host_inputs(
    batch: PackedBatch,
    blocks: Blocks,
    shape: DrafterShape,
    *,
    context_length: int,
    chunk_rows: int,
    flex: bool,
) -> HostInputs:
    """Pad to the static shapes and find the tiles.

    Args:
        batch: n <= context_length tokens.
        blocks: N blocks over it.
        shape: the drafter's.
        context_length: S.
        chunk_rows: rows of a loss chunk.
        flex: for flex attention; else for the dense path.
    """
    positions_S = np.zeros(context_length, dtype=np.int32)
    positions_S[: batch.num_tokens] = batch.positions
    slots_R = blocks.slots_R
    unsupervised = np.flatnonzero(~blocks.supervised_NB[:, 1:])
    order = np.concatenate([slots_R, unsupervised])
    num_rows = -(-len(order) // chunk_rows) * chunk_rows
    slots_P = np.zeros(num_rows, dtype=np.int64)
    slots_P[: len(order)] = order  # distinct as far as they go: padding adds zeros somewhere
    labels_P = np.zeros(num_rows, dtype=np.int64)
    labels_P[: len(slots_R)] = blocks.labels_NB[:, 1:].reshape(-1)[slots_R]
    weights_P = np.zeros(num_rows, dtype=np.float32)
    weights_P[: len(slots_R)] = blocks.weights_NB[:, 1:].reshape(-1)[slots_R]
    mask_token = np.array([shape.mask_token_id])
    arrays = {
        "token_ids_X": np.concatenate([blocks.anchor_ids_N, mask_token]).astype(np.int64),
        "positions_T": np.concatenate([positions_S, blocks.positions_NB.reshape(-1)]),
        "anchors_N": blocks.anchors_N,
        "starts_N": blocks.starts_N,
        "slots_P": slots_P,
        "labels_P": labels_P,
        "weights_P": weights_P,
        "supervised_NB": np.ascontiguousarray(blocks.supervised_NB[:, 1:]),
    }
    sizes = {"context_length": context_length, "group": shape.group}
    tiles = {
        kind: find_tiles(blocks, rule=shape.mask_rule(kind), **sizes)
        for kind in (dict.fromkeys(shape.layer_types) if flex else {})
    }
    num_chunks = -(-len(slots_R) // chunk_rows)
    return HostInputs(arrays, tiles, num_chunks, blocks.weight_sum, batch.num_tokens)


def to_device(host: HostInputs, shape: DrafterShape, device: torch.device) -> Inputs:
    """Copy to the device without waiting and build the masks there."""
    on = _copy(host.arrays | {f"tiles {kind}": tiles for kind, tiles in host.tiles.items()}, device)
    num_blocks = len(on["anchors_N"])
    num_queries, num_keys = num_blocks * shape.block_size, len(on["positions_T"])
    masks: dict[str, BlockMask | Tensor] = {}
    for kind in dict.fromkeys(shape.layer_types):
        rule = shape.mask_rule(kind)
        size = {"context_length": num_keys - num_queries, "block_size": shape.block_size}
        if kind in host.tiles:
            size["group"], kinds = shape.group, on[f"tiles {kind}"]
            mask_mod = mask_function(on["anchors_N"], on["starts_N"], rule=rule, **size)
            num_rows = num_queries * shape.group
            masks[kind] = block_mask(kinds, mask_mod, num_queries=num_rows, num_keys=num_keys)
        else:
            masks[kind] = dense_mask(on["anchors_N"], on["starts_N"], rule=rule, **size)
    rows = Rows(
        on["slots_P"], on["labels_P"], on["weights_P"], host.num_chunks, shape.block_size - 1
    )
    return Inputs(on["token_ids_X"], on["positions_T"], rows, on["supervised_NB"], masks)


def _copy(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Arrays on the device: laid end to end in host memory, moved at once, and nobody waits."""
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values()])
    # Pinned memory comes from a caching allocator that waits for the copy before re-use.
    flat = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    bytes_here, starts = flat.numpy(), [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays.values(), strict=True):
        bytes_here[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    there = flat.to(device, non_blocking=True)
    return {
        name: there[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, (name, array) in zip(starts, arrays.items(), strict=True)
    }
