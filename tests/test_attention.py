"""The mask rule, the tiles found from intervals, and both ways of running attention."""

import numpy as np
import pytest
import torch
from drafters import MIXED, inputs_for, tiny_batch, tiny_shape
from torch.nn.attention.flex_attention import flex_attention

from dflash_ddp.drafter import attention
from dflash_ddp.drafter.attention import (
    TILE,
    WHOLE,
    MaskRule,
    attend,
    block_mask,
    dense_mask,
    find_tiles,
    mask_function,
    packed,
    unpacked,
)
from dflash_ddp.drafter.blocks import make_blocks

RULES = {
    "full": MaskRule(None, False),
    "full causal": MaskRule(None, True),
    "window": MaskRule(5, False),
    "window causal": MaskRule(5, True),
    "wide window": MaskRule(150, True),
}


def loop_mask(blocks, batch, context_length, rule):
    """The rule written as loops over positions, straight from its definition."""
    size = blocks.block_size
    num_queries = len(blocks.anchors_N) * size
    mask = np.zeros((num_queries, context_length + num_queries), dtype=bool)
    document = np.cumsum(batch.positions == 0)
    for n, anchor in enumerate(blocks.anchors_N):
        for o in range(size):
            q = n * size + o
            if blocks.kept_N[n]:
                for j in range(anchor):
                    near = rule.window is None or anchor + o - j < rule.window
                    mask[q, j] = document[j] == document[anchor] and near
            for other in range(size):
                near = rule.window is None or abs(o - other) < rule.window
                mask[q, context_length + n * size + other] = near and (
                    not rule.causal or other <= o
                )
    return mask


def place(batch, anchors, num_anchors, size):
    return make_blocks(
        batch, np.array(anchors), num_anchors=num_anchors, block_size=size, gamma=None
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("size", [4, 5, 16])
def test_dense_mask_is_the_rule(name, size):
    batch = tiny_batch((40, 9, 30), prompt=2)
    blocks = place(batch, [3, 4, 11, 38, 44, 52, 70], 9, size)
    tensors = (torch.from_numpy(blocks.anchors_N), torch.from_numpy(blocks.starts_N))
    dense = dense_mask(*tensors, context_length=128, block_size=size, rule=RULES[name])
    assert np.array_equal(dense.numpy(), loop_mask(blocks, batch, 128, RULES[name]))


def test_mask_counts_of_the_published_reference():
    """S=24, B=4, anchors 0,3,7,8,15,20: 308 pairs (full), 109 and 175 (causal windows 5 and 9)."""
    batch = tiny_batch((24,), prompt=0)
    blocks = place(batch, [0, 3, 7, 8, 15, 20], 6, 4)
    tensors = (torch.from_numpy(blocks.anchors_N), torch.from_numpy(blocks.starts_N))
    for rule, pairs in (
        (MaskRule(None, False), 308),
        (MaskRule(5, True), 109),
        (MaskRule(9, True), 175),
    ):
        mask = dense_mask(*tensors, context_length=24, block_size=4, rule=rule)
        assert mask.sum() == pairs


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("size", "num_anchors"), [(16, 32), (16, 13), (10, 40), (8, 16), (128, 3)])
def test_tiles_equal_those_of_the_dense_mask(name, size, num_anchors, group):
    """Visited and fully visible tiles, counted from intervals, against the mask itself."""
    context_length = 1024
    lengths = (300, 200, 129, 255, 100)
    batch = tiny_batch(lengths, prompt=3)
    generator = np.random.default_rng(size)
    valid = np.flatnonzero(batch.loss_mask[:-1] & (batch.positions[1:] > 0))
    for kept in (num_anchors, num_anchors // 2, 0):
        anchors = np.sort(generator.choice(valid, kept, replace=False))
        blocks = place(batch, anchors, num_anchors, size)
        tensors = (torch.from_numpy(blocks.anchors_N), torch.from_numpy(blocks.starts_N))
        rule = RULES[name]
        dense = dense_mask(*tensors, context_length=context_length, block_size=size, rule=rule)
        if group > 1:
            dense = packed(dense.repeat(group, 1, 1), group=group, num_blocks=num_anchors)[0]
        rows, keys = (-(-n // TILE) * TILE for n in dense.shape)
        padded = np.zeros((rows, keys), dtype=bool)
        padded[: dense.shape[0], : dense.shape[1]] = dense.numpy()
        tiled = padded.reshape(rows // TILE, TILE, -1, TILE)
        some, every = tiled.any((1, 3)), tiled.all((1, 3))
        tiles = find_tiles(blocks, context_length=context_length, rule=rule, group=group)
        visited, full = tiles > 0, tiles == WHOLE
        assert not (some & ~visited).any()
        if (
            TILE % (size * group) == 0
        ):  # else a block that straddles two tiles may visit one too many
            assert np.array_equal(visited, some)
        # A tile may be full without being marked (a block of one tile by itself): never the reverse.
        assert not (full & ~every).any()
        in_context = np.arange(full.shape[1]) < context_length // TILE
        whole_rows = (np.arange(rows // TILE) + 1) * TILE <= dense.shape[0]
        expected = every & in_context & whole_rows[:, None]
        if TILE % (size * group) == 0:
            assert np.array_equal(full & whole_rows[:, None], expected)


@pytest.mark.parametrize("name", ["full", "window causal"])
def test_flex_attention_with_our_tiles_equals_float64(name):
    """Forward on the CPU, where flex attention exists without gradients."""
    batch = tiny_batch((150, 61), prompt=3)
    blocks = place(batch, [5, 30, 31, 140, 160, 180, 200, 205], 16, 16)
    rule = RULES[name]
    tensors = (torch.from_numpy(blocks.anchors_N), torch.from_numpy(blocks.starts_N))
    sizes = {"context_length": 256, "rule": rule, "group": 2}
    mask_mod = mask_function(*tensors, block_size=16, **sizes)
    kinds = torch.from_numpy(find_tiles(blocks, **sizes))
    mask = block_mask(kinds, mask_mod, num_queries=512, num_keys=512)
    dense = dense_mask(*tensors, context_length=256, block_size=16, rule=rule)
    q, k, v = torch.randn(4, 256, 16), torch.randn(2, 512, 16), torch.randn(2, 512, 16)
    rows = packed(q, group=2, num_blocks=16)
    out = flex_attention(rows[None], k[None], v[None], block_mask=mask)[0]
    sparse = unpacked(out, group=2, num_blocks=16)
    assert (sparse - reference(q, k, v, dense)).abs().max() < 1e-5


def reference(q, k, v, mask):
    """Attention in float64, spelt out."""
    k, v = (x.double().repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = q.double() @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).float()


def test_dense_path_equals_float64_with_gradients():
    shape = tiny_shape(kinds=MIXED.layer_types, window=6)
    _, inputs = inputs_for(tiny_batch(), shape, num_anchors=7)
    for kind, mask in inputs.masks.items():
        parts = [torch.randn(n, t, 8) for n, t in ((4, 28), (2, 156), (2, 156))]
        ours = [p.clone().requires_grad_() for p in parts]
        theirs = [p.clone().requires_grad_() for p in parts]
        out, expected = attend(*ours, mask, num_blocks=7), reference(*theirs, mask)
        assert (out - expected).abs().max() < 1e-5, kind
        pull = torch.randn_like(out)
        (out * pull).sum().backward()
        (expected * pull).sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            assert (a.grad - b.grad).abs().max() < 1e-5, kind


def test_dense_path_refuses_sizes_that_would_not_fit():
    anchors = torch.zeros(2048, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"drafter\.num_anchors"):
        dense_mask(anchors, anchors, context_length=49_152, block_size=16, rule=RULES["full"])


def test_context_must_fill_tiles():
    blocks = place(tiny_batch(), [8], 1, 4)
    with pytest.raises(ValueError, match="multiple of 128"):
        find_tiles(blocks, context_length=100, rule=RULES["full"])


@pytest.mark.parametrize(("capability", "measured"), [((9, 0), True), ((8, 0), False)])
def test_tiles_measured_on_one_chip_are_for_that_chip(monkeypatch, capability, measured):
    """A tile that fills a Hopper's shared memory does not fit into that of other chips."""
    tiles = {}
    monkeypatch.setattr(attention, "_tiles", tiles)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    attention.choose_tiles(torch.device("cuda"))
    assert bool(tiles) == measured
    attention.choose_tiles(torch.device("cpu"))
