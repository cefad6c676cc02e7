"""The shapes that benchmarks run: two real ones and a tiny one that proves that the benchmark works.

Weights, tokens and features are random, of the real shapes; nothing is zero, because a chip multiplies zeros faster.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from dflash_ddp.batch import PackedBatch
from dflash_ddp.drafter.model import FULL, SLIDING, DrafterShape

PROMPT = 16  # tokens of a document


@dataclass(frozen=True, slots=True)
class Workload:
    """Shapes of one benchmark: S tokens in documents of one length, N blocks of B.

    `target` holds the keys of config.json that make the target; target benchmarks run
    `target_tokens` in documents of 2,048.
    """

    tokens: int
    document: int
    num_anchors: int
    intermediate_size: int
    num_sliding: int
    target: dict[str, Any]
    capture_layers: tuple[int, ...]
    target_tokens: int = 16_384
    num_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    num_layers: int = 5
    block_size: int = 16

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.target["hidden_size"]

    @property
    def table_rows(self) -> int:
        """V."""
        return self.target["vocab_size"]


_PARTIAL_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
}
QWEN3_6_27B = {
    "vocab_size": 248_320,
    "hidden_size": 5_120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "rope_parameters": _PARTIAL_ROPE | {"mrope_section": [11, 11, 10]},
}
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4_096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TINY_HYBRID = {
    "vocab_size": 4_160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4_096,
    "rope_parameters": _PARTIAL_ROPE | {"mrope_section": [1, 1, 0]},
}

WORKLOADS = {
    "headline": Workload(49_152, 4_096, 2_048, 17_408, 4, QWEN3_6_27B, (1, 16, 31, 46, 61)),
    "8b": Workload(16_384, 2_048, 1_024, 12_288, 0, QWEN3_8B, (1, 9, 17, 25, 33)),
    "tiny": Workload(
        512,
        128,
        32,
        128,
        1,
        TINY_HYBRID,
        (1, 5),
        target_tokens=256,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_layers=2,
    ),
}


def target_config(work: Workload) -> PretrainedConfig:
    """The target's config: Qwen3.5's hybrid layers where the workload has linear heads, else Qwen3."""
    kind = Qwen3_5TextConfig if "linear_num_key_heads" in work.target else Qwen3Config
    return kind(tie_word_embeddings=False, **work.target)


def drafter_shape(work: Workload) -> DrafterShape:
    """The drafter of a workload."""
    kinds = (SLIDING,) * work.num_sliding + (FULL,) * (work.num_layers - work.num_sliding)
    return DrafterShape(
        hidden_size=work.hidden_size,
        intermediate_size=work.intermediate_size,
        num_attention_heads=work.num_heads,
        num_key_value_heads=work.num_key_value_heads,
        head_dim=work.head_dim,
        num_capture_layers=work.num_layers,
        layer_types=kinds,
        sliding_window=min(2_048, work.document // 2) if work.num_sliding else None,
        is_causal=None,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        block_size=work.block_size,
        mask_token_id=work.table_rows - 1,
    )


def random_batch(index: int, tokens: int, document: int, *, table_rows: int) -> PackedBatch:
    """Random tokens in documents of one length; the first `PROMPT` of each are not supervised."""
    generator = np.random.default_rng(index)
    num_documents = tokens // document
    positions = np.tile(np.arange(document, dtype=np.int32), num_documents)
    return PackedBatch(
        index=index,
        input_ids=generator.integers(0, table_rows - 1, tokens, dtype=np.int32),
        positions=positions,
        loss_mask=positions >= PROMPT,
        document_lengths=np.full(num_documents, document, dtype=np.int32),
        document_ids=np.arange(num_documents),
    )
