"""Targets with a drafter that has learnt a little from their own answers, saved as they would be served.

A drafter of random weights is never right, so that it proves nothing about accepting. `teach` fits one to a
few documents in seconds: some of its drafts are right there, most are not.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from drafters import CPU
from transformers import AutoModelForCausalLM

from dflash_ddp.batch import PackedBatch
from dflash_ddp.config import DrafterConfig, Recompute
from dflash_ddp.decode import TargetReader, decode
from dflash_ddp.drafter.blocks import make_blocks, sample_anchors
from dflash_ddp.drafter.inputs import host_inputs, to_device
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.drafter.step import LossSettings, Tables, forward_backward
from dflash_ddp.native import drafter_shape, native_config, save_native
from dflash_ddp.target.tables import default_capture_layers, read_spec

NUM_ANCHORS, CHUNK_ROWS = 48, 336


def load_target(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def own_answer(reader: TargetReader, prompt: Sequence[int], length: int) -> list[int]:
    return decode(reader, None, prompt, max_new_tokens=length).tokens


def packed(documents: Sequence[tuple[list[int], list[int]]]) -> PackedBatch:
    """(prompt, answer) pairs end to end."""
    lengths = [len(prompt) + len(answer) for prompt, answer in documents]
    masks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in documents]
    return PackedBatch(
        index=0,
        input_ids=np.concatenate([prompt + answer for prompt, answer in documents]).astype(
            np.int32
        ),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        loss_mask=np.concatenate(masks),
        document_lengths=np.array(lengths, dtype=np.int32),
        document_ids=np.arange(len(lengths)),
    )


def teach(
    target: Path,
    documents: Sequence[tuple[list[int], list[int]]],
    folder: Path,
    *,
    config: DrafterConfig,
    mask_token_id: int,
    steps: int,
    lr: float = 4e-3,
) -> Path:
    """Fit a drafter to (prompt, answer) pairs and export it to `folder`, in fp32."""
    spec = read_spec(str(target), None)
    layers = default_capture_layers(spec.num_layers, config.num_layers)
    shape = drafter_shape(config, spec, num_capture_layers=len(layers), mask_token_id=mask_token_id)
    model = load_target(target)
    reader = TargetReader(model, layers)
    batch, features = packed(documents), []
    for prompt, answer in documents:
        reader.start()
        features.append(reader.read(prompt + answer, num_logits=1).features_LC)
    tables = Tables(
        *(part.weight.detach() for part in (model.get_input_embeddings(), model.lm_head))
    )
    drafter = Drafter(shape)
    drafter.reset_parameters(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        anchors = sample_anchors(batch, NUM_ANCHORS, seed=step)
        blocks = make_blocks(
            batch, anchors, num_anchors=NUM_ANCHORS, block_size=shape.block_size, gamma=4.0
        )
        host = host_inputs(
            batch,
            blocks,
            shape,
            context_length=batch.num_tokens,
            chunk_rows=CHUNK_ROWS,
            flex=False,
        )
        forward_backward(
            drafter,
            tables,
            torch.cat(features),
            to_device(host, shape, CPU),
            scale=torch.tensor(1 / blocks.weight_sum),
            loss=LossSettings(CHUNK_ROWS, Recompute.in_forward),
        )
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir(parents=True, exist_ok=True)
    written = native_config(shape, spec, layers, torch.float32)
    save_native(folder, drafter.state_dict(), written, torch.float32)
    return folder
