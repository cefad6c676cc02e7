"""Trains the target: a small Qwen3 language model, on two CPU threads.

In:  tokenised training documents (raw file pieces and rendered chats), a step budget, a seed.
Out: `Qwen3ForCausalLM` in float32, to be saved in bfloat16.
Layout: a step sees about BATCH_TOKENS tokens, one document a row, rows of like length, padded on
the right. Causal attention keeps real tokens from padding: no mask is needed, little is wasted.
Invariant: the same documents, budget, seed and machine give the same batches in the same order.
"""

import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lean_norm import lean_norms
from transformers import Qwen3Config, Qwen3ForCausalLM

log = logging.getLogger(__name__)

BATCH_TOKENS = 3072
MAX_TOKENS = 512
LEARNING_RATE = 3e-3
WARMUP_SHARE = 0.04
WEIGHT_DECAY = 0.05
LOG_EVERY = 25
CHECKPOINT_EVERY = 100
PADDING = -100


def target_config(*, table_rows: int, eos_ids: list[int], pad_id: int) -> Qwen3Config:
    """Eight layers, so that a drafter can capture five different ones; embeddings tied."""
    return Qwen3Config(
        vocab_size=table_rows,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=eos_ids[0],
        pad_token_id=pad_id,
        bos_token_id=None,
    )


def new_target(config: Qwen3Config, *, seed: int) -> Qwen3ForCausalLM:
    """Random target; residual outputs start smaller, as in GPT-2."""
    torch.manual_seed(seed)
    # For rows this short, plain products beat the fused attention of a CPU, whose gradient is slow.
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    scale = 1.0 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    return model


def batches(epochs: Iterator[list[np.ndarray]], *, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches int64 [rows, tokens]: documents of like length, padded with PADDING."""
    rng = random.Random(seed)
    for documents in epochs:
        order = sorted(range(len(documents)), key=lambda i: (len(documents[i]), rng.random()))
        groups: list[list[np.ndarray]] = [[]]
        for index in order:
            document = documents[index][:MAX_TOKENS]
            if (len(groups[-1]) + 1) * len(document) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(document)
        rng.shuffle(groups)
        for group in groups:
            yield padded(group)


def padded(documents: Sequence[np.ndarray]) -> torch.Tensor:
    """One document a row, int64 [rows, longest], padded on the right with PADDING."""
    longest = max(len(document) for document in documents)
    rows = np.full((len(documents), longest), PADDING, dtype=np.int64)
    for row, document in zip(rows, documents, strict=True):
        row[: len(document)] = document
    return torch.from_numpy(rows)


def batch_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each document's tokens after its first, ids as from `padded`."""
    labels = ids[:, 1:]
    kept = labels != PADDING
    # bfloat16 products run four times as fast as float32 ones on CPUs with AVX512-BF16.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1].clamp(min=0), use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[kept])
    return F.cross_entropy(logits.float(), labels[kept])


def learning_rate_scale(progress: float) -> float:
    """Linear warm-up over the first 4 %, then cosine down to 2 %; progress in 0..1."""
    if progress < WARMUP_SHARE:
        return (progress + 0.1 * WARMUP_SHARE) / (1.1 * WARMUP_SHARE)
    share = min(1.0, (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE))
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share))


def optimizers_for(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_target(
    model: Qwen3ForCausalLM,
    epochs: Iterator[list[np.ndarray]],
    *,
    num_steps: int,
    minutes: float,
    seed: int,
    checkpoint: Path,
) -> int:
    """Train in place until `num_steps` or `minutes` are used up; returns the tokens seen.

    The learning rate follows whichever of the two is further along. A run that the clock ends is
    as good as its machine; a run that the steps end can be repeated. `checkpoint` gets the weights
    now and then, so that a killed build keeps them.
    """
    optimizers = optimizers_for(model)
    source = batches(epochs, seed=seed)
    start = time.monotonic()
    seen, step, progress, running = 0, 0, 0.0, math.log(model.config.vocab_size)
    model.train()
    while progress < 1:
        batch = next(source)
        with lean_norms():
            loss = batch_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_scale(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        seen += int((batch != PADDING).sum())
        running = 0.95 * running + 0.05 * float(loss.detach())
        elapsed = time.monotonic() - start
        progress = max(step / num_steps, elapsed / (60 * minutes))
        if step % LOG_EVERY == 0 or progress >= 1:
            log.info(
                "step %d/%d loss %.3f, %.2f M tokens, %.0f tokens/s, %.1f min",
                step, num_steps, running, seen / 1e6, seen / elapsed, elapsed / 60,
            )  # fmt: skip
        if step % CHECKPOINT_EVERY == 0:
            torch.save(model.state_dict(), checkpoint)
    model.eval()
    return seen
