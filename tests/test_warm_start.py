"""Starting from a published drafter: taken whole, or refused with every difference by name."""

import json
from dataclasses import replace

import pytest
import torch
from drafters import CPU, tiny_drafter
from safetensors.torch import load_file, save_file
from test_export import CAPTURE, SHAPE, TARGET

from dflash_ddp.config import ConfigError
from dflash_ddp.drafter.model import FULL, Drafter
from dflash_ddp.native import load_native, load_weights, native_config, save_native
from dflash_ddp.preflight import check_start
from dflash_ddp.target.tables import read_spec

SPEC = read_spec(str(TARGET), None)
FULL_SHAPE = replace(SHAPE, layer_types=(FULL, FULL), sliding_window=None)


@pytest.fixture
def published(tmp_path):
    """Writes a native folder, its configuration changed as asked; None removes a field."""

    def write(shape=SHAPE, inner=None, **changes):
        config = native_config(shape, SPEC, CAPTURE, torch.bfloat16) | changes
        config["dflash_config"] |= inner or {}
        for level in (config, config["dflash_config"]):
            for key in [key for key, value in level.items() if value is None]:
                del level[key]
        save_native(tmp_path, tiny_drafter(shape).state_dict(), config, torch.bfloat16)
        return tmp_path

    return write


def test_weights_are_taken_whole(published):
    folder = published()
    check_start(folder, SHAPE, SPEC, CAPTURE)
    model = Drafter(SHAPE)
    model.reset_parameters(5)
    load_weights(model, folder)
    expected = load_native(folder, CPU).state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in model.state_dict().items())


def test_an_older_configuration_says_the_same_in_other_words(published):
    """First-generation files: block size at the top, one form of the rope base, no layer types."""
    folder = published(
        FULL_SHAPE,
        {"block_size": None},
        rope_parameters=None,
        layer_types=None,
        use_sliding_window=False,
        sliding_window=4096,
        is_causal=False,
    )
    check_start(folder, FULL_SHAPE, SPEC, CAPTURE)


@pytest.mark.parametrize(
    ("inner", "changes", "words"),
    [
        ({"mask_token_id": 4102}, {}, "mask_token_id: 4102 there, 4101 here"),
        ({"target_layer_ids": [2, 5]}, {}, r"target_layer_ids: \[2, 5\] there, \[1, 4\] here"),
        ({"block_size": 16}, {}, "block_size: 16 there, 8 here"),
        ({}, {"rope_theta": 1e6, "rope_parameters": None}, "rope_theta: 1000000.0 there"),
        ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type: yarn"),
        ({}, {"is_causal": False}, "mask of layer 0: .*causal=False.* there, .*causal=True"),
        ({}, {"sliding_window": 32}, "mask of layer 0: .*window=32"),
        ({}, {"num_target_layers": 36}, "num_target_layers: 36 there, 8 here"),
        ({}, {"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05 there"),
        ({}, {"num_attention_heads": 8}, "num_attention_heads: 8 there, 4 here"),
        ({}, {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 there, None here"),
        ({"conv_kernel_size": 2}, {}, "conv_kernel_size: 2 there"),
    ],
)
def test_a_difference_is_named(published, inner, changes, words):
    with pytest.raises(ConfigError, match=words) as refused:
        check_start(published(inner=inner, **changes), SHAPE, SPEC, CAPTURE)
    assert len(str(refused.value).splitlines()) == 2, "and nothing else is"


def test_all_differences_are_named_at_once(published):
    folder = published()
    weights = load_file(folder / "model.safetensors")
    del weights["norm.weight"]
    weights["layers.0.attention_conv.base_kernel"] = torch.zeros(2, 2, 256)
    save_file(weights, folder / "model.safetensors")
    wider = replace(SHAPE, intermediate_size=128, block_size=16)
    with pytest.raises(ConfigError) as refused:
        check_start(folder, wider, SPEC, CAPTURE)
    for words in (
        "intermediate_size: 96 there, 128 here",
        "block_size: 8 there, 16 here",
        "layers.0.mlp.gate_proj.weight: [96, 256] there, [128, 256] here",
        "norm.weight: None there, [256] here",
        "layers.0.attention_conv.base_kernel: [2, 2, 256] there, None here",
    ):
        assert words in str(refused.value)


def test_what_is_no_native_folder_is_said(published, tmp_path):
    with pytest.raises(ConfigError, match="is no native drafter"):
        check_start(tmp_path / "absent", SHAPE, SPEC, CAPTURE)
    folder = published()
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="target_layer_ids"):
        check_start(folder, SHAPE, SPEC, CAPTURE)
