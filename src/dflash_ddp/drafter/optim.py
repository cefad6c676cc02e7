"""AdamW on the fp32 masters, its learning rate, and the clip."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dflash_ddp.config import OptimConfig


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Of step 0..steps-1: a linear rise to `lr`, then a cosine.

    The rise takes at least one step unless its share is zero; the last step ends exactly at
    `lr * min_lr_share` (a run of a single step uses `lr`).
    """
    warmup = math.ceil(config.warmup_share * steps)
    if step < warmup:
        return config.lr * ((step + 1) / warmup)
    left = steps - 1 - warmup
    progress = (step - warmup) / left if left > 0 else 0.0
    low = config.min_lr_share
    return config.lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW, fused; matrices decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; the norm before, fp32.

    Stays on the device: the host does not learn the norm here.
    """
    return nn.utils.clip_grad_norm_(list(parameters), max_norm, foreach=True)


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
    """One step; masters, moments and count stay as they are where the gradient's norm is not finite.

    Decided on the device, by the means that automatic mixed precision has for it.
    """
    bad = torch.logical_not(grad_norm.isfinite()).float()
    optimizer.found_inf = bad  # type: ignore[attr-defined]
    optimizer.step()
