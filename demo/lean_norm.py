"""RMS norm with a hand-written gradient, in place of the library's while the target trains.

In:  x [..., H] in float32 or bfloat16, weight float32 [H].
Out: bfloat16 [..., H], ready for the matrix products that follow each norm.
Why: on a CPU the library's norm costs some fifteen passes over memory, forward and backward, and
its float32 result is cast again by every product that reads it. This one takes about half of them.
Invariant: the saved target does not depend on this file; it is plain Qwen3.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.models.qwen3 import modeling_qwen3


class LeanNorm(torch.autograd.Function):
    """y = x / rms(x) * weight, in float32, rounded to bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Save x as it came and one scale a row."""
        x32 = x.float()
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).mul_(weight).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Gradients of x (its dtype) and of the weight (float32)."""
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad32 = grad.float()
        products = normed * grad32
        grad_weight = products.flatten(0, -2).sum(0)
        inner = (products.flatten(0, -2) @ weight).view_as(scale).div_(x.shape[-1])
        grad_x = (grad32 * weight).sub_(normed.mul_(inner)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


@contextmanager
def lean_norms() -> Iterator[None]:
    """Use LeanNorm in every Qwen3 norm inside the block."""
    norm = modeling_qwen3.Qwen3RMSNorm
    original = norm.forward

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return LeanNorm.apply(hidden_states, self.weight, self.variance_epsilon)

    norm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        norm.forward = original  # type: ignore[method-assign]
