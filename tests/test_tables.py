"""Specs and tables of tiny saved targets, and the choices that follow from a spec."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from targets import HIDDEN, KINDS, NUM_LAYERS, TABLE_ROWS, build_target, build_tokenizer
from transformers import AutoModelForCausalLM

from dflash_ddp.target import tables
from dflash_ddp.target.tables import (
    choose_capture_layers,
    choose_mask_token,
    default_capture_layers,
    read_spec,
    read_tables,
)


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    spec = read_spec(str(folder), None)
    return read_tables(str(folder), None, spec, torch.float32, "cpu")


def edit_config(folder: Path, **changes: object) -> None:
    """Overwrite top-level entries of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return build_target("qwen3_tied", tmp_path)


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return build_target("qwen3_untied", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_spec_has_the_sizes_of_the_text_config(kind: str, tmp_path: Path) -> None:
    spec = read_spec(str(build_target(kind, tmp_path)), None)
    assert (spec.hidden_size, spec.num_layers, spec.table_rows) == (HIDDEN, NUM_LAYERS, TABLE_ROWS)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.intermediate_size, spec.max_position_embeddings) == (96, 512)
    assert spec.rope_theta == {"qwen3_5": 1e7, "llama": 5e5}.get(kind, 1e6)
    assert spec.rms_norm_eps == 1e-6
    assert spec.initializer_range == 0.2
    assert spec.tied == (kind == "qwen3_tied")
    assert (spec.eos_token_ids, spec.bos_token_id, spec.pad_token_id) == ((258,), None, 256)
    assert spec.model_type == kind.split("_untied")[0].split("_tied")[0].split("_sharded")[0]


def test_spec_reads_the_flat_rope_field_of_older_files(tied: Path) -> None:
    edit_config(tied, rope_parameters=None, rope_theta=12345.0)
    assert read_spec(str(tied), None).rope_theta == 12345.0


def test_spec_reads_rope_parameters_given_for_each_layer_type() -> None:
    each_type = {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_theta": 1e6},
    }
    assert tables._nested_rope_theta(SimpleNamespace(rope_parameters=each_type)) == 1e6


def test_tie_flag_is_read_at_both_levels(tmp_path: Path) -> None:
    folder = build_target("qwen3_5", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for top, text, expected in (
        (None, None, False),
        (None, True, True),
        (True, None, True),
        (False, True, True),
        (False, None, False),
    ):
        edit_config(
            folder,
            tie_word_embeddings=top,
            text_config=config["text_config"] | {"tie_word_embeddings": text},
        )
        written = json.loads((folder / "config.json").read_text())
        if text is None:
            del written["text_config"]["tie_word_embeddings"]
            (folder / "config.json").write_text(json.dumps(written))
        assert read_spec(str(folder), None).tied is expected, (top, text)


def test_every_end_token_is_listed(tied: Path) -> None:
    edit_config(tied, eos_token_id=[258, 256])
    spec = read_spec(str(tied), None)
    assert spec.eos_token_ids == (258, 256)
    assert spec.eos_token_id == [258, 256]
    assert replace(spec, eos_token_ids=(258,)).eos_token_id == 258
    assert replace(spec, eos_token_ids=()).eos_token_id is None


def test_spec_errors_name_the_target_and_the_key(tied: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target.path='.*nothing'.*no config.json"):
        read_spec(str(tmp_path / "nothing"), None)
    (tied / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"\(gpt2\) has no 'intermediate_size'"):
        read_spec(str(tied), None)


@pytest.mark.parametrize(
    ("num_layers", "num_drafter_layers", "expected"),
    [
        (28, 5, [1, 7, 13, 19, 25]),
        (32, 5, [1, 8, 15, 22, 29]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (48, 5, [1, 12, 23, 34, 45]),
        (64, 5, [1, 16, 31, 46, 61]),
        (24, 1, [12]),
        (5, 2, [1, 2]),
        (1, 1, [0]),
    ],
)
def test_default_capture_layers(
    num_layers: int, num_drafter_layers: int, expected: list[int]
) -> None:
    assert default_capture_layers(num_layers, num_drafter_layers) == expected


@pytest.mark.parametrize(
    ("num_layers", "num_drafter_layers"), [(1, 5), (2, 2), (3, 2), (5, 5), (4, 2)]
)
def test_shallow_targets_are_told_to_set_the_layers(
    num_layers: int, num_drafter_layers: int
) -> None:
    with pytest.raises(ValueError, match=r"Set target.capture_layers to distinct ids in 0\.\."):
        default_capture_layers(num_layers, num_drafter_layers)


def test_capture_layers_are_checked() -> None:
    """Settings have refused what does not ascend; the target alone knows how far it goes."""
    assert choose_capture_layers([0, 5], 6, 2) == [0, 5]
    assert choose_capture_layers(None, 6, 1) == [3]
    with pytest.raises(ValueError, match=r"target.capture_layers=\[1, 6\].*0\.\.5"):
        choose_capture_layers([1, 6], 6, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = build_target(kind, tmp_path)
    embedding_VH, head_VH = read(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(embedding_VH, model.get_input_embeddings().weight)
    assert torch.equal(head_VH, model.get_output_embeddings().weight)
    assert (embedding_VH is head_VH) == (kind == "qwen3_tied")
    assert embedding_VH.shape == (TABLE_ROWS, HIDDEN)


def test_tables_take_the_asked_dtype(untied: Path) -> None:
    spec = read_spec(str(untied), None)
    for table in read_tables(str(untied), None, spec, torch.bfloat16, "cpu"):
        assert table.dtype == torch.bfloat16
        assert table.is_contiguous()
        assert not table.requires_grad


def test_a_sharded_target_opens_only_the_shards_that_hold_tables(tmp_path: Path) -> None:
    folder = build_target("qwen3_sharded", tmp_path)
    shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {shards["model.embed_tokens.weight"], shards["lm_head.weight"]}
    for name in set(shards.values()) - needed:
        (folder / name).unlink()
    read(folder)
    (folder / shards["lm_head.weight"]).unlink()
    with pytest.raises(ValueError, match=r"which holds .*, is missing"):
        read(folder)


def test_hub_targets_fetch_only_what_holds_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_target("qwen3_sharded", tmp_path)
    spec = read_spec(str(folder), None)
    fetched = []

    def download(path: str, name: str, *, revision: str | None) -> str:
        assert (path, revision) == ("owner/target", "abc")
        fetched.append(name)
        if not (folder / name).is_file():
            raise tables.EntryNotFoundError(name)
        return str(folder / name)

    monkeypatch.setattr(tables, "hf_hub_download", download)
    read_tables("owner/target", "abc", spec, torch.float32, "cpu")
    assert fetched[0] == "model.safetensors.index.json"
    assert len(set(fetched)) <= 3


def test_an_untied_target_without_a_head_is_refused(tied: Path) -> None:
    edit_config(tied, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"needs one tensor named \*lm_head.weight, found \[\]"):
        read(tied)


def test_a_tied_target_ignores_a_stored_head(untied: Path) -> None:
    edit_config(untied, tie_word_embeddings=True)
    embedding_VH, head_VH = read(untied)
    assert embedding_VH is head_VH


def test_two_embeddings_are_refused_but_a_prediction_head_may_have_its_own(tied: Path) -> None:
    weights = load_file(tied / "model.safetensors")
    extra = torch.zeros(TABLE_ROWS, HIDDEN)
    save_file(weights | {"mtp.embed_tokens.weight": extra}, tied / "model.safetensors")
    read(tied)
    save_file(weights | {"other.embed_tokens.weight": extra}, tied / "model.safetensors")
    with pytest.raises(ValueError, match=r"needs one tensor named \*embed_tokens.weight"):
        read(tied)


def test_table_shapes_are_checked(untied: Path) -> None:
    edit_config(untied, vocab_size=301)
    with pytest.raises(ValueError, match=r"is \[300, 64\], but config.json says .* = \[301, 64\]"):
        read(untied)


def test_files_other_than_safetensors_are_refused(tied: Path) -> None:
    (tied / "model.safetensors").unlink()
    (tied / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"found neither model\.safetensors nor"):
        read(tied)


class TestMaskToken:
    """`choose_mask_token` on real specs with a tokenizer of 259 entries."""

    @pytest.fixture
    def spec(self, tied: Path) -> tables.TargetSpec:
        return read_spec(str(tied), None)

    def test_explicit_wins(self, spec: tables.TargetSpec, caplog: pytest.LogCaptureFixture) -> None:
        tokenizer = build_tokenizer()
        assert choose_mask_token(spec, tokenizer, 299) == 299
        assert choose_mask_token(spec, tokenizer, 257) == 257
        assert not caplog.records
        assert choose_mask_token(spec, tokenizer, 65) == 65
        assert "ordinary token" in caplog.text

    @pytest.mark.parametrize("explicit", [-1, 300, 256, 258])
    def test_bad_explicit_ids(self, spec: tables.TargetSpec, explicit: int) -> None:
        message = rf"mask_token_id={explicit} .*in 0\.\.299 and none of .* \[256, 258\]"
        with pytest.raises(ValueError, match=message):
            choose_mask_token(spec, build_tokenizer(), explicit)

    def test_bos_is_refused(self, spec: tables.TargetSpec) -> None:
        with pytest.raises(ValueError, match="none of the pad, start and end tokens"):
            choose_mask_token(replace(spec, bos_token_id=270), build_tokenizer(), 270)

    def test_qwen3_takes_the_first_free_row(self, spec: tables.TargetSpec) -> None:
        tokenizer = build_tokenizer()
        assert choose_mask_token(spec, tokenizer, None) == len(tokenizer) == 259

    def test_qwen3_5_takes_its_special_token(self, spec: tables.TargetSpec) -> None:
        big = replace(spec, model_type="qwen3_5", table_rows=248320)
        assert choose_mask_token(big, build_tokenizer(), None) == 248070
        small = replace(spec, model_type="qwen3_5")
        assert choose_mask_token(small, build_tokenizer(), None) == 259

    def test_others_take_the_mask_token_of_the_tokenizer(self, spec: tables.TargetSpec) -> None:
        llama = replace(spec, model_type="llama")
        tokenizer = build_tokenizer()
        with pytest.raises(
            ValueError, match=r"drafter.mask_token_id: there is no default .*'llama'"
        ):
            choose_mask_token(llama, tokenizer, None)
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        assert choose_mask_token(llama, tokenizer, None) == 259

    def test_a_full_qwen3_table_has_no_free_row(self, spec: tables.TargetSpec) -> None:
        with pytest.raises(ValueError, match="there is no default"):
            choose_mask_token(replace(spec, table_rows=259), build_tokenizer(), None)
