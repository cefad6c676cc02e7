"""Learning rate, masters, and what AdamW is given."""

import pytest
import torch
from drafters import tiny_drafter, tiny_shape

from dflash_ddp.config import OptimConfig
from dflash_ddp.drafter.optim import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    step_if_finite,
)


@pytest.mark.parametrize("steps", [1, 2, 3, 25, 1000])
def test_warm_up_then_cosine_to_the_very_end(steps):
    config = OptimConfig(lr=1.0, warmup_share=0.04, min_lr_share=0.1)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert max(rates) == 1.0
    assert all(0 < rate <= 1 for rate in rates)
    if steps > 2:
        assert rates[-1] == pytest.approx(0.1)
    top = rates.index(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_norms_move_and_do_not_decay():
    """bf16 weights of 1.0 would round every step of 6e-4 away; fp32 masters do not."""
    model = tiny_drafter(tiny_shape())
    model.reset_parameters(0)
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.1))
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert (model.norm.weight < 1.0).all()
    decays = {
        group["weight_decay"]: {p.dim() for p in group["params"]}
        for group in optimizer.param_groups
    }
    assert decays == {0.1: {2}, 0.0: {1}}


def test_clip_is_on_the_global_norm():
    model = tiny_drafter(tiny_shape())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(p.numel() for p in model.parameters())
    assert clip_gradients(model.parameters(), 1.0).item() == pytest.approx(count**0.5)
    total = sum(p.grad.square().sum().item() for p in model.parameters())
    assert total == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_bad_gradient_changes_nothing(bad):
    """Not the masters, moments or count: what follows equals a run without that step, bit for bit."""
    models = [tiny_drafter(tiny_shape(), seed=1) for _ in range(2)]
    optimizers = [make_optimizer(model, OptimConfig(weight_decay=0.1)) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(0)
        for step in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if step == 2 and model is models[1]:
                continue
            if step == 2:
                model.norm.weight.grad[0] = bad
            step_if_finite(optimizer, clip_gradients(model.parameters(), 1.0))
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        states = optimizers[0].state[ours], optimizers[1].state[theirs]
        assert states[0]["step"] == states[1]["step"] == 4
        assert torch.equal(states[0]["exp_avg_sq"], states[1]["exp_avg_sq"])


def test_adamw_is_that_of_torch_for_loops():
    """The fused kernel against the plain one."""
    models = [tiny_drafter(tiny_shape(), seed=1) for _ in range(2)]
    config = OptimConfig(weight_decay=0.1, lr=1e-2)
    fused = make_optimizer(models[0], config)
    groups = [{**group, "params": []} for group in fused.param_groups]
    for group in groups:
        wanted = 1 if group["weight_decay"] == 0 else 2
        group["params"] = [p for p in models[1].parameters() if p.dim() == wanted]
        group.update(fused=False, foreach=False)
    plain = torch.optim.AdamW(groups, fused=False, foreach=False)
    for model, optimizer in zip(models, (fused, plain), strict=True):
        torch.manual_seed(0)
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
