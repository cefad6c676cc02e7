"""Compile the target's decoder layers: one kernel where eager PyTorch runs five.

In: a frozen target. Out: the same model with compiled layers; layers of a kind share one
compilation for all row shapes. Hooks run outside the compiled code, so capture does not change.

The linear attention of Qwen3.5 calls two functions that a compiler cannot read or should not keep:
the gated delta rule (Triton kernels of flash-linear-attention, made one opaque operator here) and
the short causal convolution (a slow library call without causal-conv1d, written out here as shifted
products that the compiler fuses). Both stand in only inside compiled code.

Nothing of Qwen3.5 is imported here: with flash-linear-attention its module wakes CUDA at import,
before the rank has chosen its GPU, and other targets need neither.
"""

import logging
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dflash_ddp.target.model import decoder_layers

logger = logging.getLogger(__name__)

_theirs: dict[str, Callable] = {}  # what stands in the target's module without us, by name


def compile_layers(model: PreTrainedModel, *, backend: str | Callable = "inductor") -> None:
    """Compile the layers of a frozen target, in place: on the main thread, before capture."""
    layers = decoder_layers(model)
    for layer in layers:
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None:
            module = vars(sys.modules[type(mixer).__module__])
            for name in _OURS.keys() & module.keys():
                _theirs.setdefault(name, module[name])
                module[name] = _OURS[name]
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
    logger.info("%d target layers will be compiled at their first forward", len(layers))


@torch.library.custom_op("dflash_ddp::gated_delta_rule", mutates_args=())
def opaque_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The delta rule from an empty state: query, key, value `[R, L, heads, D]`, out like value."""
    options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
    return _theirs["torch_chunk_gated_delta_rule"](query, key, value, **options)[0].contiguous()


@opaque_delta_rule.register_fake
def _delta_rule_shape(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """All that the compiler learns of the operator: the shape and dtype of its output."""
    return value.new_empty(value.shape)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: object
) -> tuple[Tensor, Tensor | None]:
    """In place of transformers' delta rule, with its keywords."""
    if not torch.compiler.is_compiling():
        return _theirs["torch_chunk_gated_delta_rule"](query, key, value, g=g, beta=beta, **options)
    # Contiguous here, where the compiler writes them so, and not by a copy in the library.
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    return opaque_delta_rule(query, key, value, g, beta), None


def convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: object,
) -> Tensor:
    """In place of transformers' causal convolution: `[R, channels, L]`, `[channels, taps]`."""
    if not torch.compiler.is_compiling():
        return _theirs["causal_conv1d_fn"](
            hidden_states, weight, bias, activation=activation, **options
        )
    if activation != "silu" or bias is not None:
        raise ValueError(f"unexpected convolution: activation {activation!r}, bias {bias}")
    taps, length = weight.shape[-1], hidden_states.shape[-1]
    # Token by token, as the products before and after it are laid out: 4 times as fast on an H200.
    padded_RLC = F.pad(hidden_states.transpose(1, 2), (0, 0, taps - 1, 0))
    total_RLC = torch.zeros_like(padded_RLC[:, :length], dtype=torch.float32)
    for tap in range(taps):
        total_RLC = total_RLC + padded_RLC[:, tap : tap + length].float() * weight[:, tap]
    return F.silu(total_RLC).to(hidden_states.dtype).transpose(1, 2)


_OURS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "causal_conv1d_fn": convolution,
}
