"""Exports: every reader gets what it reads, from the names and fields that it looks for."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import CPU, inputs_for, random_context, run_drafter, tiny_batch, tiny_drafter
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from targets import HIDDEN, TABLE_ROWS, build_target

from dflash_ddp.config import ConfigError
from dflash_ddp.drafter.model import FULL, SLIDING, DrafterShape
from dflash_ddp.export import ExportConfig, Format, check_mask_token, export
from dflash_ddp.native import WEIGHTS_FILE, load_native, native_config, save_native
from dflash_ddp.settings import parse, resolved
from dflash_ddp.target.tables import read_spec, read_tables
from dflash_ddp.train import CONF_DIR

TARGET = Path(__file__).resolve().parents[1] / "demo" / "target"
CAPTURE = [1, 4]
MASK_TOKEN = 4101
SHAPE = DrafterShape(
    hidden_size=256,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_capture_layers=len(CAPTURE),
    layer_types=(SLIDING, FULL),
    sliding_window=64,
    is_causal=None,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
    block_size=8,
    mask_token_id=MASK_TOKEN,
)


def run_folder(
    folder: Path, shape: DrafterShape = SHAPE, *overrides: str, target: Path = TARGET
) -> Path:
    """A run that has ended, as far as an export reads it."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        words = ["experiment=demo", "steps=480", f"target.path={target}", *overrides]
        config = parse(compose("train", words))
    (folder / "export").mkdir(parents=True)
    written = native_config(shape, read_spec(str(target), None), CAPTURE, torch.bfloat16)
    save_native(folder / "export", tiny_drafter(shape).state_dict(), written, torch.bfloat16)
    (folder / "config.yaml").write_text(json.dumps(resolved(config)))
    rows = [
        {"step": 0, "heldout/accept_length": 1.0, "heldout/documents": 60},
        {
            "step": config.steps,
            "heldout/accept_length": 1.875,
            "heldout/standard_error": 0.05,
            "heldout/documents": 60,
        },
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    return export(ExportConfig(run=str(run_folder(folder / "run")), out=str(folder / "out")))


@pytest.fixture(scope="module")
def speculators(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("speculators")
    run = run_folder(folder / "run")
    return export(ExportConfig(run=str(run), out=str(folder / "out"), format=Format.speculators))


def at(config: dict, path: str):
    for key in path.split("."):
        config = config[key]
    return config


# What the servers' loaders look up, and what it must be for this drafter. Where a loader looks at two
# places, both are listed.
READ_BY_BOTH = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": 4160,
    "max_position_embeddings": 2048,
    "layer_types": [SLIDING, FULL],
    "sliding_window": 64,
    "rope_parameters.rope_theta": 10_000.0,
    "rope_parameters.rope_type": "default",
    "dflash_config.target_layer_ids": CAPTURE,
    "dflash_config.mask_token_id": MASK_TOKEN,
}
READ_BY_SGLANG = {
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "block_size": 8,
    "dflash_config.block_size": 8,
    "num_target_layers": 8,
}
READ_BY_VLLM = {"model_type": "qwen3", "use_sliding_window": True, "dtype": "bfloat16"}
# Fields that a loader obeys if they are there, and that would change what this drafter computes.
MUST_BE_ABSENT = (
    "is_causal draft_vocab_size logit_scale is_neox_style rope_is_neox_style target_hidden_size "
    "eagle_aux_hidden_state_layer_ids attention_sink_bias output_multiplier input_embedding_scale "
    "final_logit_softcapping conv_kernel_size selector_rank quantization_config eagle_config"
).split()
ABSENT_INSIDE = "causal use_swa swa_window_size layer_ids use_aux_hidden_state mask_token".split()


@pytest.mark.parametrize(
    ("path", "expected"), (READ_BY_BOTH | READ_BY_SGLANG | READ_BY_VLLM).items()
)
def test_every_field_that_a_server_reads_is_written(native, path, expected):
    assert at(json.loads((native / "config.json").read_text()), path) == expected


def test_no_field_that_would_change_the_drafter_is_written(native):
    config = json.loads((native / "config.json").read_text())
    assert not [key for key in MUST_BE_ABSENT if key in config]
    assert not [key for key in ABSENT_INSIDE if key in config["dflash_config"]]


def test_two_way_sliding_layers_are_said_where_both_servers_look(tmp_path):
    run = run_folder(tmp_path / "run", replace(SHAPE, is_causal=False))
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "out")))
    assert json.loads((out / "config.json").read_text())["is_causal"] is False


def test_weight_names_are_those_that_the_servers_fuse_and_prefix(native):
    """vLLM and SGLang put q, k, v and gate, up together; nothing may be missing or left over."""
    stored = load_file(native / "model.safetensors")
    fused: dict[str, list[str]] = {}
    for name in stored:
        parameter = name
        for whole, part in (
            *((".qkv_proj", f".{x}_proj") for x in "qkv"),
            (".gate_up_proj", ".gate_proj"),
            (".gate_up_proj", ".up_proj"),
        ):
            parameter = parameter.replace(part, whole)
        fused.setdefault(f"model.{parameter}", []).append(name)
    layer = {
        "self_attn.qkv_proj": 3,
        "self_attn.o_proj": 1,
        "self_attn.q_norm": 1,
        "self_attn.k_norm": 1,
        "mlp.gate_up_proj": 2,
        "mlp.down_proj": 1,
        "input_layernorm": 1,
        "post_attention_layernorm": 1,
    }
    expected = {f"model.layers.{i}.{name}.weight": n for i in (0, 1) for name, n in layer.items()}
    expected |= dict.fromkeys(
        ("model.fc.weight", "model.hidden_norm.weight", "model.norm.weight"), 1
    )
    assert {name: len(parts) for name, parts in fused.items()} == expected
    assert len(stored) == 3 + 11 * 2
    assert stored["fc.weight"].shape == (256, len(CAPTURE) * 256)
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert not [name for name in stored if re.search("mask_hidden|t2d|d2t|scale|midlayer", name)]


def test_zlabs_class_loads_it_strictly(native):
    zlab = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    model, report = zlab.DFlashDraftModel.from_pretrained(native, output_loading_info=True)
    assert not any(report.values())
    assert model.block_size == SHAPE.block_size
    assert model.target_layer_ids == CAPTURE
    assert model.mask_token_id == MASK_TOKEN


# speculators


SPECULATORS_FIELDS = {
    "speculators_model_type": "dflash",
    "speculators_config.algorithm": "dflash",
    "speculators_config.default_proposal_method": "greedy",
    "speculators_config.proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
    "speculators_config.verifier.name_or_path": str(TARGET),
    "speculators_config.verifier.architectures": ["Qwen3ForCausalLM"],
    "aux_hidden_state_layer_ids": [2, 5],
    "mask_token_id": MASK_TOKEN,
    "block_size": 8,
    "draft_vocab_size": 4160,
    "target_hidden_size": 256,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "transformer_layer_config.layer_types": [SLIDING, FULL],
    "transformer_layer_config.head_dim": 32,
    "transformer_layer_config.rope_parameters.rope_theta": 10_000.0,
}


@pytest.mark.parametrize(("path", "expected"), SPECULATORS_FIELDS.items())
def test_every_field_of_speculators_is_written(speculators, path, expected):
    assert at(json.loads((speculators / "config.json").read_text()), path) == expected


@pytest.mark.parametrize(("kind", "causal"), [("demo", None), ("demo", False), ("qwen3_5", None)])
def test_speculators_class_loads_it_strictly_with_equal_logits(tmp_path, kind, causal):
    """Blocks in two documents, shorter than the window: its class draws the window's edge otherwise."""
    models = pytest.importorskip(
        "speculators.models.dflash", reason="pip install --no-deps speculators==0.9.0"
    )
    shape, target = replace(SHAPE, is_causal=causal), TARGET
    if kind != "demo":
        target = build_target(kind, tmp_path / "target")
        shape = replace(shape, hidden_size=HIDDEN, mask_token_id=TABLE_ROWS - 1)
    run = run_folder(tmp_path / "run", shape, target=target)
    out = export(ExportConfig(run=str(run), out=str(tmp_path / "out"), format=Format.speculators))
    config = models.DFlashSpeculatorConfig.from_pretrained(out)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = models.DFlashDraftModel.from_pretrained(out, config=config, dtype=torch.float32)
    saved = load_file(out / "model.safetensors")
    loaded = theirs.state_dict()
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in saved.items())
    owned = {"embed_tokens.weight", "lm_head.weight"}
    owned |= {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert loaded.keys() - saved.keys() == owned, "the target's, and nothing else"
    batch, anchors = tiny_batch((37, 40)), [6, 8, 20, 25, 43, 50, 60]
    features = random_context(batch.num_tokens, shape)
    chosen = torch.zeros(1, batch.num_tokens, dtype=torch.int64)
    chosen[0, anchors] = 1
    with torch.no_grad():
        _, logits, *_ = theirs._backbone_forward(
            features[None],
            torch.from_numpy(batch.input_ids.astype(np.int64))[None],
            chosen,
            torch.zeros(1, batch.num_tokens, shape.hidden_size),
            torch.from_numpy(np.repeat([0, 1], [37, 40]))[None],
            torch.from_numpy(batch.positions.astype(np.int64))[None],
            max_anchors=len(anchors),
        )
    spec = read_spec(str(target), None)
    embedding, head = read_tables(str(target), None, spec, torch.float32, CPU)
    _, inputs = inputs_for(
        batch, shape, anchors=anchors, num_anchors=len(anchors), context_length=batch.num_tokens
    )
    with torch.no_grad():
        ours = run_drafter(load_native(run / "export", CPU), features, embedding, inputs) @ head.T
    expected = logits[0].unflatten(0, (len(anchors), -1))[:, 1:]
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    assert expected.std() > 0.1


# Refusals and the card.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_causal": True}, "two-way inside a block"),
        ({"sliding_window": 5}, "sliding_window=5 below block_size=8"),
    ],
)
def test_what_speculators_cannot_say_is_refused(tmp_path, changes, words):
    run = run_folder(tmp_path / "run", replace(SHAPE, **changes))
    options = ExportConfig(run=str(run), out=str(tmp_path / "out"), format=Format.speculators)
    with pytest.raises(ConfigError, match=words):
        export(options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
@pytest.mark.parametrize("form", list(Format))
def test_weights_that_would_not_load_back_are_not_written(tmp_path, fault, form):
    run = run_folder(tmp_path / "run")
    file = run / "export" / "model.safetensors"
    weights = load_file(file)
    if fault == "missing":
        del weights["norm.weight"]
    elif fault == "extra":
        weights["layers.0.mlp_conv.base_kernel"] = torch.zeros(2, 2, 256)
    else:
        weights["fc.weight"] = weights["fc.weight"][:, :256].contiguous()
    save_file(weights, file)
    with pytest.raises(ConfigError, match="nothing is exported"):
        export(ExportConfig(run=str(run), out=str(tmp_path / "out"), format=form))
    assert sorted(place.name for place in tmp_path.iterdir()) == ["run"]


def test_an_existing_folder_and_an_empty_run_are_refused(native, tmp_path):
    with pytest.raises(ConfigError, match="exists"):
        export(ExportConfig(run=str(tmp_path), out=str(native)))
    with pytest.raises(ConfigError, match="neither export/ nor a checkpoint"):
        export(ExportConfig(run=str(tmp_path), out=str(tmp_path / "out")))
    with pytest.raises(ConfigError, match="give run=<dir> out=<dir>"):
        export(ExportConfig())
    run = run_folder(tmp_path / "run")
    for text in ("{{: [", "seed: x"):
        (run / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"run/config.yaml cannot be read"):
            export(ExportConfig(run=str(run), out=str(tmp_path / "out")))


@pytest.mark.parametrize("mask", [4160, -1, 4096, 4098, 7])
def test_a_mask_token_without_row_or_with_another_use_is_refused(native, mask):
    config = json.loads((native / "config.json").read_text())
    check_mask_token(config)
    config["bos_token_id"], config["eos_token_id"] = 7, [4098, 4097]
    config["dflash_config"]["mask_token_id"] = mask
    with pytest.raises(ConfigError, match=f"mask_token_id={mask} must be a row"):
        check_mask_token(config)


def test_the_card_knows_which_step_was_exported(tmp_path):
    """An export that is the best checkpoint, not the last one."""
    run = run_folder(tmp_path / "run")
    weights = load_file(run / "export" / "model.safetensors")
    for step in (120, 240, 480):
        folder = run / "checkpoints" / f"step_{step:08d}"
        shutil.copytree(run / "export", folder)
        if step != 240:
            save_file(
                weights | {"norm.weight": weights["norm.weight"] + step}, folder / WEIGHTS_FILE
            )
    card = (export(ExportConfig(run=str(run), out=str(tmp_path / "out"))) / "README.md").read_text()
    assert "240 optimizer steps" in card
    assert "| accept length | not measured |" in card, "1.875 is that of step 480"
    checkpoint = run / "checkpoints" / "step_00000480"
    options = ExportConfig(run=str(run), drafter=str(checkpoint), out=str(tmp_path / "last"))
    assert "480 optimizer steps" in (export(options) / "README.md").read_text()


def test_the_card_says_for_what_from_what_how_good_and_how_to_serve(native, tmp_path):
    card = (native / "README.md").read_text()
    for words in (
        f"base_model: {TARGET}",
        "**1.875** ± 0.050",
        "60 held-out documents, step 480",
        "480 optimizer steps",
        "demo/train.jsonl",
        "the template's own default",
        f"row {MASK_TOKEN} ",
        '"num_speculative_tokens": 7',
        "--speculative-num-draft-tokens 8",
        "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve",
    ):
        assert words in card, words
    assert "started from" not in card
    more = ["data.enable_thinking=false", "drafter.init_from=earlier"]
    run = run_folder(tmp_path / "run", SHAPE, *more)
    row = {"step": 480, "heldout/walk_on_text": 2.5, "heldout/documents": 9}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    card = (export(ExportConfig(run=str(run), out=str(tmp_path / "out"))) / "README.md").read_text()
    assert "its walk is 2.500" in card
    assert "tokens a target call" not in card
    assert '{"enable_thinking": false}' in card
    assert "; started from earlier |" in card
