"""Tiny random targets, saved as transformers would save real ones.

In: a kind from `KINDS` and an empty folder. Out: that folder with config.json, safetensors and a
byte-level tokenizer, ready for `from_pretrained`. Nothing is downloaded. The tables have more rows
than the tokenizer has entries, as Qwen's have. Weights are wider than usual, so that a leak or a
shifted layer is far above rounding.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("qwen3_tied", "qwen3_untied", "qwen3_sharded", "qwen3_5", "llama")
NUM_LAYERS = 6
HIDDEN = 64
TABLE_ROWS = 300
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 256 bytes and three special tokens, ids 0..258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _common() -> dict:
    """Sizes and ids that all kinds share."""
    return {
        "vocab_size": TABLE_ROWS,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 256,
        "bos_token_id": None,
        "eos_token_id": 258,
    }


def _qwen3_5_model(*, tied: bool) -> Qwen3_5ForConditionalGeneration:
    """A hybrid target inside a vision wrapper: layer i attends fully where i % 4 == 3."""
    text = _common() | {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return Qwen3_5ForConditionalGeneration(config)


def build_target(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Save a tiny random target of one of `KINDS` under `folder` and return the folder."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    if kind in ("qwen3_tied", "qwen3_untied", "qwen3_sharded"):
        tied = kind == "qwen3_tied"
        config = Qwen3Config(**_common(), rope_parameters=rope, tie_word_embeddings=tied)
        model = Qwen3ForCausalLM(config)
    elif kind == "llama":
        rope = {"rope_type": "default", "rope_theta": 5e5}
        config = LlamaConfig(**_common(), rope_parameters=rope, tie_word_embeddings=False)
        model = LlamaForCausalLM(config)
    elif kind == "qwen3_5":
        model = _qwen3_5_model(tied=False)
    else:
        raise ValueError(f"kind={kind!r} is not one of {KINDS}")
    model.save_pretrained(folder, max_shard_size="200KB" if kind == "qwen3_sharded" else "5GB")
    build_tokenizer().save_pretrained(folder)
    return folder
