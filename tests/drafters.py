"""Small drafters, batches and inputs for tests: random, but of every kind that matters."""

import numpy as np
import torch

from dflash_ddp.batch import PackedBatch
from dflash_ddp.drafter.blocks import Blocks, make_blocks, sample_anchors
from dflash_ddp.drafter.inputs import Inputs, host_inputs, to_device
from dflash_ddp.drafter.model import FULL, SLIDING, Drafter, DrafterShape

CPU = torch.device("cpu")
VOCABULARY = 97


def tiny_shape(
    *,
    kinds: tuple[str, ...] = (FULL, FULL),
    window: int | None = None,
    causal: bool | None = None,
    block_size: int = 4,
    hidden_size: int = 32,
) -> DrafterShape:
    return DrafterShape(
        hidden_size=hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_capture_layers=3,
        layer_types=kinds,
        sliding_window=window,
        is_causal=causal,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        initializer_range=0.05,
        block_size=block_size,
        mask_token_id=VOCABULARY - 1,
    )


MIXED = tiny_shape(kinds=(SLIDING, FULL), window=7)


def tiny_batch(
    lengths: tuple[int, ...] = (37, 21), *, seed: int = 0, prompt: int = 5, index: int = 0
) -> PackedBatch:
    """Documents of random tokens; the first `prompt` of each are not generated."""
    generator = np.random.default_rng(seed)
    num_tokens = sum(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    return PackedBatch(
        index=index,
        input_ids=generator.integers(0, VOCABULARY - 1, num_tokens).astype(np.int32),
        positions=positions,
        loss_mask=positions >= prompt,
        document_lengths=np.array(lengths, dtype=np.int32),
        document_ids=np.arange(len(lengths), dtype=np.int64),
    )


def tiny_drafter(shape: DrafterShape, *, seed: int = 0) -> Drafter:
    """Random weights, norms included, so that a norm left out is noticed."""
    model = Drafter(shape)
    model.reset_parameters(seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4)
    return model


def random_context(num_tokens: int, shape: DrafterShape, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = shape.num_capture_layers * shape.hidden_size
    return torch.randn(num_tokens, width, generator=generator)


def table(shape: DrafterShape, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100)
    return torch.randn(VOCABULARY, shape.hidden_size, generator=generator)


def inputs_for(
    batch: PackedBatch,
    shape: DrafterShape,
    *,
    num_anchors: int = 8,
    context_length: int = 128,
    chunk_rows: int = 16,
    gamma: float | None = 4.0,
    anchors: list[int] | None = None,
    device: torch.device = CPU,
    flex: bool = False,
) -> tuple[Blocks, Inputs]:
    places = sample_anchors(batch, num_anchors, seed=0) if anchors is None else np.array(anchors)
    blocks = make_blocks(
        batch, places, num_anchors=num_anchors, block_size=shape.block_size, gamma=gamma
    )
    host = host_inputs(
        batch, blocks, shape, context_length=context_length, chunk_rows=chunk_rows, flex=flex
    )
    return blocks, to_device(host, shape, device)


def run_drafter(
    model: Drafter, features_SC: torch.Tensor, embedding_VH: torch.Tensor, inputs: Inputs
) -> torch.Tensor:
    """Hidden states [N, B-1, H]."""
    x_XH = embedding_VH[inputs.token_ids_X]
    hidden_MH = model(features_SC, x_XH, inputs.positions_T, inputs.masks)
    return hidden_MH.unflatten(0, (len(x_XH) - 1, -1))
