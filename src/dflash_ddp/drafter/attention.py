"""Attention of blocks over their context: one mask rule, two ways to run it.

Keys and values lie as `[context (S) | block 0 | block 1 | ... | block N-1]`, queries as the N * B slots. Every query
sees two intervals of keys, which is the whole rule:

    context   [max(start, a + o - W + 1), a)      start: first token of the document; W: window of sliding layers
    own block [S + n*B, S + (n+1)*B)              cut at the query itself on causal layers, to |o - o'| < W on sliding

`visible` states the rule for one (query, key) pair. On GPUs compiled flex attention runs it block-sparse; the tiles
that it visits are counted from the intervals in O(N + tiles), not found by trying all pairs. On CPUs, where flex
attention has no backward, the same rule fills a dense mask for scaled_dot_product_attention.

For flex attention the query heads that share a key head lie below each other, block by block (`packed`), as the rows
of one head: a tile of 128 rows then spans few anchors, so that fewer tiles are cut by the edges of what a block sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_ddp.drafter.blocks import Blocks

TILE = 128  # rows and columns of a flex attention tile
PARTIAL, WHOLE = 1, 2  # kinds of tiles that are visited
MAX_DENSE_SCORES = 1 << 28  # scores per head of the dense path: 1 GiB in fp32


@dataclass(frozen=True, slots=True)
class MaskRule:
    """What distinguishes one kind of layer: its window and whether a block is causal inside.

    Attributes:
        window: keys with query_position - key_position < window are visible; None: all.
        causal: inside a block, whether a slot sees only itself and earlier ones.
    """

    window: int | None
    causal: bool


def visible(
    query: Tensor,
    key: Tensor,
    *,
    anchors_N: Tensor,
    starts_N: Tensor,
    block_size: int,
    rule: MaskRule,
) -> Tensor:
    """Whether `query` (slot index) sees `key` (index into context then blocks); broadcasts.

    S, the length of the context part, is carried by the caller through `key`: context keys are
    >= 0, and the key of block slot j is -1 - j. So the rule needs no S and both callers agree.
    No operation is in place: flex attention cannot compile such a rule.
    """
    block = torch.clamp(query // block_size, max=len(anchors_N) - 1)  # flex pads queries to a tile
    offset = query % block_size
    anchor = anchors_N[block]
    in_context = (key >= starts_N[block]) & (key < anchor)
    slot = -1 - key
    in_block = (key < 0) & (slot // block_size == query // block_size)
    if rule.window is not None:
        in_context = in_context & (anchor + offset - key < rule.window)
        in_block = in_block & (torch.abs(slot % block_size - offset) < rule.window)
    if rule.causal:
        in_block = in_block & (slot % block_size <= offset)
    return in_context | in_block


def mask_function(
    anchors_N: Tensor,
    starts_N: Tensor,
    *,
    context_length: int,
    block_size: int,
    rule: MaskRule,
    group: int = 1,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as flex attention's mask_mod(batch, head, query, key), `group` heads packed."""

    def mask_mod(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        signed = torch.where(key < context_length, key, context_length - 1 - key)
        return visible(
            row // (group * block_size) * block_size + row % block_size,
            signed,
            anchors_N=anchors_N,
            starts_N=starts_N,
            block_size=block_size,
            rule=rule,
        )

    return mask_mod


def check_dense_size(num_queries: int, num_keys: int) -> None:
    """ValueError if the scores of one head would not fit; flex attention is for such sizes."""
    if num_queries * num_keys > MAX_DENSE_SCORES:
        raise ValueError(
            f"dense attention over {num_queries:,} draft positions x {num_keys:,} keys needs "
            f"{num_queries * num_keys * 4 / 2**30:.1f} GiB of scores per head, above the limit of "
            f"{MAX_DENSE_SCORES * 4 / 2**30:.1f} GiB; lower drafter.num_anchors or "
            "tokens_per_batch, or train on a GPU, where attention is block-sparse"
        )


def dense_mask(
    anchors_N: Tensor, starts_N: Tensor, *, context_length: int, block_size: int, rule: MaskRule
) -> Tensor:
    """The rule as a bool matrix [Q, S + Q]; ValueError if it is too large."""
    num_queries = len(anchors_N) * block_size
    num_keys = context_length + num_queries
    check_dense_size(num_queries, num_keys)
    device = anchors_N.device
    query = torch.arange(num_queries, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask_mod = mask_function(
        anchors_N, starts_N, context_length=context_length, block_size=block_size, rule=rule
    )
    none = torch.zeros((), dtype=torch.int64, device=device)
    return mask_mod(none, none, query, key)


def find_tiles(
    blocks: Blocks, *, context_length: int, rule: MaskRule, group: int = 1
) -> np.ndarray:
    """Which tiles the rule touches, and which it covers, by counting interval ends.

    Each block adds +1 where its interval of key tiles begins and -1 where it ends; a running sum
    over key tiles then counts, for every tile, the blocks that touch it. A tile is full when every
    row of the query tile covers it; counting covering blocks is enough, as all rows of a block
    share an interval but for the window's edge, for which the last slot is the strictest.

    Args:
        blocks: N blocks of B slots.
        context_length: S.
        rule: of the layer.
        group: query heads packed into one: a block then has `group * B` rows.

    Returns:
        uint8 [query tiles, key tiles]: 0 not visited, PARTIAL (the rule must be asked pair by
        pair) or WHOLE (all visible).

    Raises:
        ValueError: if the context is no multiple of the tile.
    """
    if context_length % TILE:
        raise ValueError(f"context of {context_length} tokens is not a multiple of {TILE}")
    size = blocks.block_size
    num_blocks = len(blocks.anchors_N)
    num_rows = size * group
    num_query_tiles = -(-num_blocks * num_rows // TILE)
    num_key_tiles = (context_length + num_blocks * size + TILE - 1) // TILE
    anchors = blocks.anchors_N.astype(np.int64)
    first = last = blocks.starts_N.astype(np.int64)
    if rule.window is not None:  # the first slot sees furthest back, the last slot least
        first = np.maximum(first, anchors - rule.window + 1)
        last = np.maximum(last, anchors + size - rule.window)
    row, own = np.arange(num_blocks) * num_rows, context_length + np.arange(num_blocks) * size
    touched = np.zeros((num_query_tiles, num_key_tiles + 1), dtype=np.int32)
    covered = np.zeros_like(touched)
    members = np.zeros(num_query_tiles, dtype=np.int32)
    for tile, inside in _query_tiles(row, num_rows):
        np.add.at(members, tile[inside], 1)
        seen = inside & (first < anchors)
        _count(touched, tile[seen], first[seen] // TILE, -(-anchors[seen] // TILE))
        whole_from, whole_to = -(-last // TILE), anchors // TILE
        whole = inside & (whole_from < whole_to)
        _count(covered, tile[whole], whole_from[whole], whole_to[whole])
        _count(touched, tile[inside], own[inside] // TILE, -(-(own[inside] + size) // TILE))
    any_visible = np.cumsum(touched, axis=1)[:, :-1] > 0
    full = np.cumsum(covered, axis=1)[:, :-1] == members[:, None]
    if (num_blocks * num_rows) % TILE:
        full[-1] = False  # rows past the last belong to no block
    return np.where(full, WHOLE, any_visible * PARTIAL).astype(np.uint8)


def _query_tiles(row: np.ndarray, num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tile, whether it counts) for the tiles that each block's rows lie in, from its first row."""
    first, last = row // TILE, (row + num_rows - 1) // TILE
    widest = int((last - first).max(initial=0))
    return [(np.minimum(first + i, last), first + i <= last) for i in range(widest + 1)]


def _count(counts: np.ndarray, tile: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
    np.add.at(counts, (tile, begin), 1)
    np.add.at(counts, (tile, end), -1)


def ordered_tiles(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [rows, columns] -> int32 counts [rows] and indices [rows, columns], true ones first.

    What lies past a row's count is never read. Asks the device nothing.
    """
    num_rows, num_columns = tiles.shape
    place = torch.where(tiles, tiles.cumsum(1) - 1, num_columns)  # false ones: one place too many
    columns = torch.arange(num_columns, dtype=torch.int32, device=tiles.device)
    indices = columns.new_zeros(num_rows, num_columns + 1)
    indices.scatter_(1, place, columns.expand(num_rows, -1))
    return tiles.sum(1, dtype=torch.int32), indices[:, :-1].contiguous()


def block_mask(
    kinds: Tensor,
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    *,
    num_queries: int,
    num_keys: int,
) -> BlockMask:
    """A BlockMask from `find_tiles` on the device: keys by query tile, and queries by key tile.

    The lists are made on the device: they are eight times as large as what they are made of. Every
    mask for flex attention comes from here, so that the kernels' tiles are chosen before it compiles.
    """
    choose_tiles(kinds.device)
    partial, full = kinds == PARTIAL, kinds == WHOLE
    lists = [
        array[None, None]
        for tiles in (partial, full, partial.T, full.T)
        for array in ordered_tiles(tiles)
    ]
    keys, key_tiles, full_keys, full_key_tiles, *by_key = lists
    queries, query_tiles, full_queries, full_query_tiles = by_key
    return BlockMask(
        seq_lengths=(num_queries, num_keys),
        kv_num_blocks=keys,
        kv_indices=key_tiles,
        full_kv_num_blocks=full_keys,
        full_kv_indices=full_key_tiles,
        q_num_blocks=queries,
        q_indices=query_tiles,
        full_q_num_blocks=full_queries,
        full_q_indices=full_query_tiles,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod,
    )


# Eager flex attention would materialise every score (320 GiB at 2,048 anchors over 49,152 tokens), so it is always
# called through this compiled form; fullgraph turns a fall-back to eager into an error.
_compiled_flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)


# Tiles of the kernels that were fastest on an H200 at head width 128, for one sliding layer of the headline workload,
# packed: forward 3.9 ms, backward 8.4 ms (next best 8.9, with two tiles of 32 x 128 and 8 warps 9.4).
# (ROWS_GUARANTEED_SAFE is not for us: a row may see nothing of the first tile it visits: its gradient would be NaN.)
_HOPPER_TILES: Any = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 128,
    "fwd_num_warps": 8,
    "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 4,
    "bwd_num_stages": 3,
}
_tiles: Any = {}  # in use; without any flex attention takes its own for the chip


def choose_tiles(device: torch.device) -> None:
    """On a Hopper chip take the measured tiles; others hold less in the memory of a multiprocessor."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        _tiles.update(_HOPPER_TILES)


# For fewer than 128 rows flex attention has a kernel for decoding, whose bounds do not know our tiles.
_ONE_KERNEL: Any = {"FORCE_USE_FLEX_ATTENTION": True}


def packed(q_AQD: Tensor, *, group: int, num_blocks: int) -> Tensor:
    """Queries of heads that share a key head as rows of one head: [A, N * B, D] -> [G, N * A/G * B, D]."""
    blocks = q_AQD.unflatten(0, (-1, group)).unflatten(2, (num_blocks, -1))
    return blocks.transpose(1, 2).flatten(1, 3)


def unpacked(out_GRD: Tensor, *, group: int, num_blocks: int) -> Tensor:
    """The reverse of `packed`."""
    blocks = out_GRD.unflatten(1, (num_blocks, group, -1))
    return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def attend(
    q_AQD: Tensor, k_GTD: Tensor, v_GTD: Tensor, mask: BlockMask | Tensor, *, num_blocks: int
) -> Tensor:
    """Attention output [A, Q, D]; A query heads share G key/value heads.

    Args:
        q_AQD: queries [A, Q, D].
        k_GTD: keys [G, S + Q, D], context first.
        v_GTD: values, like the keys.
        mask: a BlockMask over packed queries (GPU, flex attention) or a dense bool [Q, S + Q] (any device).
        num_blocks: N.
    """
    q, k, v = q_AQD[None], k_GTD[None], v_GTD[None]
    if isinstance(mask, BlockMask):
        measured = q.shape[-1] == 128 and q.dtype == torch.bfloat16  # fp32 tiles would not fit
        options = (_tiles if measured else {}) | _ONE_KERNEL
        sizes = {"group": len(q_AQD) // len(k_GTD), "num_blocks": num_blocks}
        rows = packed(q_AQD, **sizes)[None]
        out = _compiled_flex_attention(rows, k, v, block_mask=mask, kernel_options=options)
        return unpacked(out[0], **sizes)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0]
