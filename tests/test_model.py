"""The drafter against z-lab's published class, and against what it must not see."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafters import (
    MIXED,
    VOCABULARY,
    inputs_for,
    random_context,
    run_drafter,
    table,
    tiny_batch,
    tiny_drafter,
    tiny_shape,
)

from dflash_ddp.drafter.model import FULL, SLIDING, DrafterShape
from dflash_ddp.native import CONFIG_FILE, load_native, load_shape, native_config, save_native

zlab = pytest.importorskip("dflash.model", reason="z-lab's reference: pip install --no-deps dflash")

S = 128
SHAPES = {
    "full": tiny_shape(),
    "one layer": tiny_shape(kinds=(FULL,)),
    "sliding causal": MIXED,
    "sliding two-way": tiny_shape(kinds=(SLIDING, SLIDING, FULL), window=6, causal=False),
    "window below block": tiny_shape(kinds=(SLIDING, FULL), window=3, causal=False, block_size=8),
    "all causal": tiny_shape(causal=True),
}


TARGET = SimpleNamespace(
    num_layers=6,
    max_position_embeddings=512,
    table_rows=VOCABULARY,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)


def export(folder, shape, model):
    folder.mkdir(exist_ok=True)
    capture = list(range(shape.num_capture_layers))
    config = native_config(shape, TARGET, capture, torch.float32)
    save_native(folder, model.state_dict(), config, torch.float32)


@pytest.mark.parametrize("name", SHAPES)
def test_training_layout_equals_zlab_cached_inference(name, tmp_path):
    """Every block of one training forward equals z-lab's draft with a cache, anchor by anchor."""
    shape = SHAPES[name]
    model = tiny_drafter(shape)
    export(tmp_path, shape, model)
    reference, report = zlab.DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    lengths = (37, 21)
    batch = tiny_batch(lengths)
    features = torch.zeros(S, shape.num_capture_layers * shape.hidden_size)
    features[: batch.num_tokens] = random_context(batch.num_tokens, shape)
    features[batch.num_tokens :] = 1e3  # padding that would be noticed
    # closer than a block, first and last of an answer, both documents
    anchors = [5, 6, 8, 20, 33, 35, 42, 43, 55]
    blocks, inputs = inputs_for(batch, shape, anchors=anchors, num_anchors=11)
    embedding = table(shape)
    with torch.no_grad():
        ours = run_drafter(model, features, embedding, inputs)
    worst = 0.0
    for first, length in ((0, 37), (37, 21)):
        own = [(n, a) for n, a in enumerate(anchors) if first <= a < first + length]
        drafts = zlab_drafts(
            reference,
            features[first : first + length],
            batch.input_ids[first:],
            embedding,
            [a - first for _, a in own],
        )
        for (n, _), draft in zip(own, drafts, strict=True):
            worst = max(worst, (ours[n] - draft).abs().max().item())
    assert blocks.kept_N.sum() == len(anchors)
    assert worst < 1e-5


@torch.no_grad()
def zlab_drafts(reference, features, ids, embedding, anchors):
    """z-lab's loop: its cache grows by the context since the last anchor, block entries cropped."""
    cache = zlab._make_cache(reference.config)
    done, drafts = 0, []
    size = reference.block_size
    for anchor in anchors:
        block_ids = torch.full((1, size), reference.mask_token_id)
        block_ids[0, 0] = int(ids[anchor])
        hidden = reference(
            target_hidden=features[None, done:anchor],
            noise_embedding=embedding[block_ids],
            position_ids=torch.arange(done, anchor + size)[None],
            past_key_values=cache,
            use_cache=True,
        )
        zlab._crop_to(cache, anchor)
        done = anchor
        drafts.append(hidden[0, 1:])
    return drafts


@pytest.mark.parametrize("name", SHAPES)
def test_a_block_sees_its_own_past_and_itself_only(name):
    shape = SHAPES[name]
    model, batch, embedding = tiny_drafter(shape), tiny_batch(), table(shape)
    anchors = [8, 10, 20, 45]
    _, inputs = inputs_for(batch, shape, anchors=anchors, num_anchors=5)
    features = random_context(S, shape)

    def outputs(features, inputs=inputs):
        with torch.no_grad():
            return run_drafter(model, features, embedding, inputs)

    before = outputs(features)
    for place in range(batch.num_tokens):
        changed = features.clone()
        changed[place] += 1.0
        moved = (outputs(changed) - before).abs().amax(dim=(1, 2)) > 0
        for n, anchor in enumerate(anchors):
            same_document = (anchor < 37) == (place < 37)
            if not (place < anchor and same_document):
                assert not moved[n], f"block at {anchor} saw context at {place}"
        if shape.layer_types[-1] == FULL:  # and it does see what it may
            assert all(
                moved[n] for n, a in enumerate(anchors) if place < a and (a < 37) == (place < 37)
            )
    other_token = inputs.token_ids_X.clone()
    other_token[1] = (other_token[1] + 1) % 90
    changed = outputs(
        features,
        type(inputs)(
            other_token,
            *(getattr(inputs, f) for f in ("positions_T", "rows", "supervised_NB", "masks")),
        ),
    )
    moved = (changed - before).abs().amax(dim=2) > 0
    assert moved[1].all(), "slot 0 must reach every slot of its block"
    assert not moved[[0, 2, 3]].any(), "and no other block"


def test_slots_of_a_full_layer_see_later_slots():
    """Two-way inside a block: the position of the last slot changes the first one's output."""
    for causal, expected in ((None, True), (True, False)):
        shape = tiny_shape(causal=causal)
        model, batch, embedding = tiny_drafter(shape), tiny_batch(), table(shape)
        _, inputs = inputs_for(batch, shape, anchors=[8, 20], num_anchors=2)
        features = random_context(S, shape)
        moved_positions = inputs.positions_T.clone()
        moved_positions[S + shape.block_size - 1] += 1  # last slot of block 0
        fields = (
            inputs.token_ids_X,
            moved_positions,
            inputs.rows,
            inputs.supervised_NB,
            inputs.masks,
        )
        with torch.no_grad():
            before = run_drafter(model, features, embedding, inputs)
            after = run_drafter(model, features, embedding, type(inputs)(*fields))
        assert ((after - before)[0, 0].abs().max() > 0) == expected
        assert (after - before)[1].abs().max() == 0


def test_fresh_weights_depend_on_the_seed_alone():
    shape = tiny_shape()
    first, again, other = tiny_drafter(shape), tiny_drafter(shape), tiny_drafter(shape, seed=1)
    first.reset_parameters(3)
    again.reset_parameters(3)
    other.reset_parameters(4)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert (first.norm.weight == 1).all()
    assert abs(first.fc.weight.std().item() - shape.initializer_range) < 0.005


def test_export_round_trip(tmp_path):
    model = tiny_drafter(MIXED)
    export(tmp_path, MIXED, model)
    assert load_shape(tmp_path) == MIXED
    loaded = load_native(tmp_path, torch.device("cpu"))
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == MIXED.block_size
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    del config["dflash_config"]["mask_token_id"]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mask_token_id"):
        load_shape(tmp_path)


def test_parameter_count_of_the_published_drafters():
    """1,048,626,432 for Qwen3-8B and 1,730,213,120 for Qwen3.6-27B, as their weight files say."""
    for hidden, inner, expected in ((4096, 12288, 1_048_626_432), (5120, 17408, 1_730_213_120)):
        shape = DrafterShape(
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            num_capture_layers=5,
            layer_types=(FULL,) * 5,
            sliding_window=None,
            is_causal=None,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            initializer_range=0.02,
            block_size=16,
            mask_token_id=0,
        )
        with torch.device("meta"):
            from dflash_ddp.drafter.model import Drafter

            model = Drafter(shape)
        assert sum(p.numel() for p in model.parameters()) == expected
        assert len(model.state_dict()) == 3 + 11 * 5
        assert np.all([p.dtype == torch.float32 for p in model.parameters()])
