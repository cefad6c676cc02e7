"""The proofs of the drafter again, on a GPU: compiled flex attention, compiled steps, bf16."""

import dataclasses

import numpy as np
import pytest
import torch
from drafters import (
    inputs_for,
    random_context,
    table,
    tiny_batch,
    tiny_drafter,
    tiny_shape,
)

from dflash_ddp.config import Recompute
from dflash_ddp.drafter.attention import attend, dense_mask
from dflash_ddp.drafter.loss import logits_to_grad
from dflash_ddp.drafter.model import FULL, SLIDING
from dflash_ddp.drafter.step import LossSettings, Tables, compile_step, forward_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
SHAPE = dataclasses.replace(
    tiny_shape(kinds=(SLIDING, FULL), window=50, block_size=16, hidden_size=64), head_dim=16
)


def float64_attention(q, k, v, mask):
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("num_tokens", "context_length", "num_anchors", "head_dim"),
    [
        (127, 128, 8, 16),
        (128, 128, 8, 128),
        (129, 256, 9, 64),
        (1025, 1152, 40, 128),
        (4000, 4096, 256, 128),
    ],
)
def test_flex_attention_equals_float64(num_tokens, context_length, num_anchors, head_dim):
    """fp32 to 1e-2 relative of the largest value (tensor cores round to tf32), with gradients."""
    torch.compiler.reset()  # one process may compile a function for eight shapes only
    lengths = (num_tokens // 2, num_tokens - num_tokens // 2)
    batch = tiny_batch(lengths, prompt=3)
    options = {"num_anchors": num_anchors, "context_length": context_length}
    blocks, inputs = inputs_for(batch, SHAPE, device=GPU, flex=True, **options)
    generator = torch.Generator(device=GPU).manual_seed(0)
    num_queries = num_anchors * SHAPE.block_size
    sizes = ((4, num_queries), (2, context_length + num_queries), (2, context_length + num_queries))
    parts = [torch.randn(*size, head_dim, device=GPU, generator=generator) for size in sizes]
    for kind in (SLIDING, FULL):
        ours = [p.clone().requires_grad_() for p in parts]
        exact = [p.double().requires_grad_() for p in parts]
        out = attend(*ours, inputs.masks[kind], num_blocks=num_anchors)
        anchors, starts = (torch.from_numpy(x).to(GPU) for x in (blocks.anchors_N, blocks.starts_N))
        mask = dense_mask(
            anchors,
            starts,
            context_length=context_length,
            block_size=SHAPE.block_size,
            rule=SHAPE.mask_rule(kind),
        )
        expected = float64_attention(*exact, mask)
        pull = torch.randn_like(out)
        (out * pull).sum().backward()
        (expected * pull.double()).sum().backward()
        pairs = [(out, expected)] + [(a.grad, b.grad) for a, b in zip(ours, exact, strict=True)]
        for got, want in pairs:
            assert (got.double() - want).abs().max() <= 1e-2 * want.abs().max()


def gradients(device, dtype, recompute, *, compiled):
    model = tiny_drafter(SHAPE).to(device)
    flex = device.type == "cuda"
    _, inputs = inputs_for(
        tiny_batch((300, 120, 60), prompt=3),
        SHAPE,
        num_anchors=24,
        context_length=512,
        chunk_rows=64,
        device=device,
        flex=flex,
    )
    loss = LossSettings(64, recompute)
    if compiled:
        loss = loss._replace(functions=compile_step(model))
    tables = Tables(table(SHAPE).to(device, dtype), table(SHAPE, seed=5).to(device, dtype))
    features = random_context(512, SHAPE).to(device, dtype)
    scale = torch.tensor(0.01, device=device)
    result = forward_backward(model, tables, features, inputs, scale=scale, loss=loss)
    return result.loss_sum.item(), {n: p.grad.cpu() for n, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", list(Recompute))
def test_compiled_step_equals_the_plain_cpu_step(recompute):
    """fp32: loss to 1e-5, each gradient to 1e-2 of its largest value."""
    expected, reference = gradients(
        torch.device("cpu"), torch.float32, Recompute.none, compiled=False
    )
    loss, found = gradients(GPU, torch.float32, recompute, compiled=True)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, grad in found.items():
        assert (grad - reference[name]).abs().max() <= 1e-2 * reference[name].abs().max(), name


def test_bf16_step_is_near_the_fp32_one():
    """bf16: loss to 1%, direction of the whole gradient to cosine 0.99."""
    expected, reference = gradients(
        torch.device("cpu"), torch.float32, Recompute.none, compiled=False
    )
    loss, found = gradients(GPU, torch.bfloat16, Recompute.in_forward, compiled=True)
    assert loss == pytest.approx(expected, rel=0.01)
    a, b = (torch.cat([g[n].flatten() for n in reference]) for g in (found, reference))
    assert torch.cosine_similarity(a, b, dim=0) > 0.99


def test_a_steady_step_asks_the_gpu_nothing():
    """Inputs, forward and backward queue up without one synchronisation; nothing is recompiled."""
    model = tiny_drafter(SHAPE).to(GPU)
    loss = LossSettings(64, Recompute.in_forward, compile_step(model))
    tables = Tables(*(table(SHAPE, seed=s).to(GPU, torch.bfloat16) for s in (0, 5)))
    features = random_context(512, SHAPE).to(GPU, torch.bfloat16)
    scale = torch.tensor(0.01, device=GPU)

    def step(seed):
        lengths = tuple(np.random.default_rng(seed).multinomial(480, [0.5, 0.3, 0.2]).tolist())
        _, inputs = inputs_for(
            tiny_batch(lengths, seed=seed, prompt=3),
            SHAPE,
            num_anchors=24,
            context_length=512,
            chunk_rows=64,
            device=GPU,
            flex=True,
        )
        forward_backward(model, tables, features, inputs, scale=scale, loss=loss)

    step(0)
    step(1)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(2, 8):
            step(seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_logits_are_turned_into_their_gradient_in_place():
    """Compiled, at a real vocabulary: losses and gradients against float64, and no second [R, V]."""
    torch.compiler.reset()
    generator = torch.Generator(device=GPU).manual_seed(0)
    num_rows, vocabulary = 256, 151_936
    logits = 4 * torch.randn(num_rows, vocabulary, device=GPU, generator=generator)
    logits = logits.bfloat16()
    labels = torch.randint(vocabulary, (num_rows,), device=GPU, generator=generator)
    labels[:128] = logits[:128].argmax(-1)
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    losses.sum().backward()
    right = logits.argmax(-1) == labels
    to_grad = torch.compile(logits_to_grad, fullgraph=True, dynamic=False)
    to_grad(logits.clone(), labels)
    found = logits.clone()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found_losses, found_right = to_grad(found, labels)
    assert torch.cuda.max_memory_allocated() - before < found.nbytes / 4
    assert torch.equal(found_right, right)
    assert (found_losses.double() - losses).abs().max() < 1e-4
    assert (found.double() - exact.grad).abs().max() <= 2**-8
    assert torch.allclose(found.double(), exact.grad, rtol=1e-2, atol=1e-9)


def test_memory_is_the_same_for_any_lengths():
    """50 packed batches of other documents: the peak of a step does not move."""
    torch.compiler.reset()
    model = tiny_drafter(SHAPE).to(GPU)
    loss = LossSettings(64, Recompute.in_forward, compile_step(model))
    tables = Tables(*(table(SHAPE, seed=s).to(GPU, torch.bfloat16) for s in (0, 5)))
    features = random_context(512, SHAPE).to(GPU, torch.bfloat16)
    scale = torch.tensor(0.01, device=GPU)
    peaks = []
    for seed in range(50):
        generator = np.random.default_rng(seed)
        shares = generator.dirichlet(np.ones(3))
        lengths = tuple(8 + n for n in generator.multinomial(480, shares).tolist())
        batch = tiny_batch(lengths, seed=seed, prompt=3)
        sizes = {"num_anchors": 24, "context_length": 512, "chunk_rows": 64}
        torch.cuda.reset_peak_memory_stats()
        _, inputs = inputs_for(batch, SHAPE, device=GPU, flex=True, **sizes)
        forward_backward(model, tables, features, inputs, scale=scale, loss=loss)
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert max(peaks[1:]) - min(peaks[1:]) < 2**20


def test_few_rows_are_no_other_kernel():
    """64 rows in bf16 at head width 128: within bf16 of float64, and nothing beside them is touched."""
    torch.compiler.reset()
    blocks, inputs = inputs_for(
        tiny_batch((64, 64), prompt=3),
        SHAPE,
        num_anchors=2,
        context_length=128,
        device=GPU,
        flex=True,
    )
    generator = torch.Generator(device=GPU).manual_seed(0)
    sizes = ((4, 32, 128), (2, 160, 128), (2, 160, 128))
    parts = [torch.randn(s, device=GPU, generator=generator, dtype=torch.bfloat16) for s in sizes]
    anchors, starts = (torch.from_numpy(x).to(GPU) for x in (blocks.anchors_N, blocks.starts_N))
    for kind in (SLIDING, FULL):
        mask = dense_mask(
            anchors, starts, context_length=128, block_size=16, rule=SHAPE.mask_rule(kind)
        )
        expected = float64_attention(*(part.double() for part in parts), mask)
        out = attend(*parts, inputs.masks[kind], num_blocks=2)
        assert (out.double() - expected).abs().max() <= 2e-2 * expected.abs().max()
