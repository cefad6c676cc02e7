"""One optimizer step is the same step however its documents are dealt out, and equals a float64 one spelt out.

Two packed batches with very unequal numbers of labels, or none at all, go through
`step.forward_backward` under the scale of `DrafterWorker._scale` in three ways: as one microbatch that
holds both, as two microbatches, and on two ranks whose gradients are averaged as DDP averages them. The
reference drafts one block after the other from the documents themselves: no packing, no masks, no chunks.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drafters import (
    CPU,
    inputs_for,
    random_context,
    table,
    tiny_batch,
    tiny_drafter,
    tiny_shape,
)

from dflash_ddp.batch import PackedBatch
from dflash_ddp.config import OptimConfig, Recompute
from dflash_ddp.drafter import worker
from dflash_ddp.drafter.blocks import anchor_candidates, make_blocks, sample_anchors
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.drafter.optim import clip_gradients, make_optimizer
from dflash_ddp.drafter.step import LossSettings, Tables, forward_backward

SHAPE = tiny_shape()
S, GAMMA, CHUNK_ROWS, NUM_ANCHORS = 128, 4.0, 16, 8
TABLES = Tables(table(SHAPE), table(SHAPE, seed=1))
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.01)
RECOMPUTE = list(Recompute)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: threads that wait for each other would only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Microbatch = tuple[PackedBatch, list[int], torch.Tensor]  # documents, anchors, features


def microbatch(lengths: tuple[int, ...], prompt: int, seed: int) -> Microbatch:
    batch = tiny_batch(lengths, prompt=prompt, seed=seed, index=seed)
    features = torch.zeros(S, SHAPE.num_capture_layers * SHAPE.hidden_size)
    features[: batch.num_tokens] = random_context(batch.num_tokens, SHAPE, seed=seed)
    return batch, sample_anchors(batch, NUM_ANCHORS, seed=0).tolist(), features


def many(seed: int) -> Microbatch:
    return microbatch((37, 21), 5, seed)


def few(seed: int) -> Microbatch:
    """Three labels."""
    return microbatch((13, 9), 11, seed)


def none(seed: int) -> Microbatch:
    """One generated token at the end: no anchor has a successor."""
    return microbatch((12,), 11, seed)


def joined(first: Microbatch, second: Microbatch) -> Microbatch:
    """Both in one packed batch, with the same anchors."""
    (batch, anchors, features), (other, more, others) = first, second
    middle = batch.num_tokens
    names = ("input_ids", "positions", "loss_mask", "document_lengths", "document_ids")
    arrays = {name: np.concatenate([getattr(batch, name), getattr(other, name)]) for name in names}
    rows = torch.cat([features[:middle], others])[:S]
    return PackedBatch(index=0, **arrays), anchors + [middle + anchor for anchor in more], rows


def blocks_of(part: Microbatch):
    batch, anchors, _ = part
    places = np.array(anchors, dtype=np.int64)
    return make_blocks(
        batch,
        places,
        num_anchors=2 * NUM_ANCHORS,
        block_size=SHAPE.block_size,
        gamma=GAMMA,
    )


def weight_of(parts: list[Microbatch]) -> float:
    return sum(blocks_of(part).weight_sum for part in parts)


def scale_of(own: list[Microbatch], all_parts: list[Microbatch], num_ranks: int) -> torch.Tensor:
    """The scale as a worker finds it, with an all-reduce that knows the other ranks."""
    others = weight_of(all_parts) - weight_of(own)
    rank = SimpleNamespace(
        world=SimpleNamespace(device=CPU, drafter_group=None), num_drafters=num_ranks
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.dist, "all_reduce", lambda total, group: total.add_(others))
        return worker.DrafterWorker._scale(rank, weight_of(own))


def accumulate(
    model: Drafter, own: list[Microbatch], scale: torch.Tensor, *, recompute=Recompute.in_forward
) -> None:
    """The backward passes of one rank."""
    for batch, anchors, features in own:
        _, inputs = inputs_for(
            batch,
            SHAPE,
            anchors=anchors,
            num_anchors=2 * NUM_ANCHORS,
            context_length=S,
            chunk_rows=CHUNK_ROWS,
            gamma=GAMMA,
        )
        settings = LossSettings(CHUNK_ROWS, recompute)
        forward_backward(model, TABLES, features, inputs, scale=scale, loss=settings)


def one_microbatch(model: Drafter, parts: list[Microbatch]) -> None:
    whole = [joined(*parts)]
    accumulate(model, whole, scale_of(whole, whole, 1))


def two_microbatches(model: Drafter, parts: list[Microbatch]) -> None:
    accumulate(model, parts, scale_of(parts, parts, 1))


def two_ranks(model: Drafter, parts: list[Microbatch]) -> None:
    """DDP sums the ranks' gradients and divides by their number."""
    for part in parts:
        accumulate(model, [part], scale_of([part], parts, 2))
    for parameter in model.parameters():
        parameter.grad /= 2


WAYS = [one_microbatch, two_microbatches, two_ranks]


# The reference.


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + SHAPE.rms_norm_eps).sqrt()


def turned(x_TAD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding; row t stands at position t."""
    half = SHAPE.head_dim // 2
    rates = SHAPE.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x_TAD), dtype=torch.float64)[:, None, None] * rates
    first, second = x_TAD[..., :half], x_TAD[..., half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    )


def drafted(w: dict[str, torch.Tensor], features: torch.Tensor, anchor_id: int) -> torch.Tensor:
    """Logits [B-1, V] of one block after the documents' features [a, C]."""
    embedding, head = (each.double() for each in TABLES)
    context = norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = embedding[[anchor_id] + [SHAPE.mask_token_id] * (SHAPE.block_size - 1)]
    for i in range(len(SHAPE.layer_types)):
        layer = {
            name.removeprefix(f"layers.{i}."): value
            for name, value in w.items()
            if name.startswith(f"layers.{i}.")
        }

        def project(rows: torch.Tensor, name: str, layer: dict = layer) -> torch.Tensor:
            out = rows @ layer[f"self_attn.{name}_proj.weight"].T
            return out.unflatten(-1, (-1, SHAPE.head_dim))

        rows = norm(x, layer["input_layernorm.weight"])
        q = norm(project(rows, "q"), layer["self_attn.q_norm.weight"])
        k = norm(project(torch.cat([context, rows]), "k"), layer["self_attn.k_norm.weight"])
        v = project(torch.cat([context, rows]), "v")
        q = turned(torch.cat([q.new_zeros(len(context), *q.shape[1:]), q]))[len(context) :]
        groups = SHAPE.num_attention_heads // SHAPE.num_key_value_heads
        k, v = turned(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qad,kad->aqk", q, k) / SHAPE.head_dim**0.5
        attended = torch.einsum("aqk,kad->qad", scores.softmax(-1), v).flatten(1)
        x = x + attended @ layer["self_attn.o_proj.weight"].T
        rows = norm(x, layer["post_attention_layernorm.weight"])
        gate = F.silu(rows @ layer["mlp.gate_proj.weight"].T)
        up = rows @ layer["mlp.up_proj.weight"].T
        x = x + (gate * up) @ layer["mlp.down_proj.weight"].T
    return norm(x[1:], w["norm.weight"]) @ head.T


def reference_loss(w: dict[str, torch.Tensor], parts: list[Microbatch]) -> torch.Tensor:
    """Weighted mean cross-entropy of all labels of all parts."""
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for batch, anchors, features in parts:
        for a in anchors:
            start = a - int(batch.positions[a])
            logits = drafted(w, features[start:a], int(batch.input_ids[a]))
            for slot in range(1, SHAPE.block_size):
                place = a + slot
                inside = place < batch.num_tokens and batch.positions[place] > 0
                if not (inside and batch.loss_mask[place]):
                    break
                label = torch.tensor(int(batch.input_ids[place]))
                weight = float(np.exp(-(slot - 1) / GAMMA))
                total = total + weight * F.cross_entropy(logits[slot - 1], label)
                weights += weight
    return total / weights if weights else total + 0 * sum(p.sum() for p in w.values())


def doubles(model: Drafter) -> dict[str, torch.Tensor]:
    return {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, name: str) -> None:
    worst = (found.double() - wanted).abs().max().item()
    assert worst <= tolerance, f"{name}: {worst} > {tolerance}"


# The proofs.

PAIRS = {
    "uneven": [many(1), few(2)],
    "no label in one": [many(3), none(4)],
    "no label in the other": [none(5), few(6)],
    "no label at all": [none(7), none(8)],
}


def test_pairs_are_as_uneven_as_they_claim():
    counts = {name: [len(p[1]) for p in pair] for name, pair in PAIRS.items()}
    assert counts == {
        "uneven": [8, 1],
        "no label in one": [8, 0],
        "no label in the other": [0, 1],
        "no label at all": [0, 0],
    }
    assert len(anchor_candidates(PAIRS["uneven"][0][0])) > NUM_ANCHORS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
def test_gradient_is_that_of_the_mean_over_all_labels(name, way):
    model = tiny_drafter(SHAPE)
    way(model, PAIRS[name])
    reference = doubles(model)
    reference_loss(reference, PAIRS[name]).backward()
    largest = max(p.grad.abs().max().item() for p in reference.values())
    assert (largest > 0.01) == (name != "no label at all")
    for key, parameter in model.named_parameters():
        assert_near(parameter.grad, reference[key].grad, 2e-6 * largest, key)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_batch_without_labels_leaves_zero_gradients(recompute):
    """Not None: DDP waits for every parameter of every rank."""
    model, parts = tiny_drafter(SHAPE), [none(1)]
    accumulate(model, parts, torch.tensor(0.7), recompute=recompute)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert scale_of(parts, parts, 1).item() == 0.0


def steps() -> Iterator[list[Microbatch]]:
    """Five steps, each of other documents; the third has labels in one part, the fourth nowhere."""
    yield [many(11), few(12)]
    yield [few(13), many(14)]
    yield [none(15), many(16)]
    yield [none(17), none(18)]
    yield [many(19), few(20)]


def trained(way) -> dict[str, torch.Tensor]:
    model = tiny_drafter(SHAPE)
    optimizer = make_optimizer(model, OPTIM)
    for parts in steps():
        way(model, parts)
        clip_gradients(model.parameters(), OPTIM.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def test_parameters_agree_after_five_steps():
    reference = doubles(tiny_drafter(SHAPE))
    decayed = [p for p in reference.values() if p.dim() > 1]
    others = [p for p in reference.values() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas, decay = (OPTIM.beta1, OPTIM.beta2), OPTIM.weight_decay
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIM.lr, betas=betas, eps=OPTIM.eps, weight_decay=decay
    )
    for parts in steps():
        optimizer.zero_grad()
        reference_loss(reference, parts).backward()
        size = torch.stack([p.grad.square().sum() for p in reference.values()]).sum().sqrt()
        for parameter in reference.values():
            parameter.grad *= min(1.0, OPTIM.max_grad_norm / (size.item() + 1e-6))
        optimizer.step()
    start = dict(tiny_drafter(SHAPE).named_parameters())
    for way in WAYS:
        for name, parameter in trained(way).items():
            assert_near(parameter, reference[name], 0.01 * OPTIM.lr, f"{way.__name__} {name}")
            assert (parameter - start[name]).abs().max() > OPTIM.lr, "it moved"
