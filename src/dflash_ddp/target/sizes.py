"""How large the part of a target is that runs, from config.json alone: the model is built without memory.

In: a folder or hub id, and how many layers run. Out: `costs.TargetSizes`. No weight is read or made.
"""

import torch
from torch import nn
from transformers import AutoModel

from dflash_ddp.costs import TargetSizes
from dflash_ddp.target.model import decoder_layers
from dflash_ddp.target.tables import TargetSpec, read_config


def read_sizes(
    path: str, revision: str | None, spec: TargetSpec, *, num_layers: int, trust_remote_code: bool
) -> TargetSizes:
    """Sizes of the first `num_layers` layers; of experts, those that a token takes.

    Raises:
        ValueError: there is no config.json, or the model's layout is unknown.
    """
    text = read_config(path, revision, trust_remote_code).get_text_config(decoder=True)
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    with torch.device("meta"):
        model = AutoModel.from_config(text, trust_remote_code=trust_remote_code)
    layers = decoder_layers(model)
    experts = (getattr(text, "num_experts", None) or 1, getattr(text, "num_experts_per_tok", 1))
    linear = [layer for layer in layers if hasattr(layer, "linear_attn")]
    full = [layer for layer in layers if not hasattr(layer, "linear_attn")]
    width = spec.num_attention_heads * spec.head_dim
    return TargetSizes(
        weights=sum(p.numel() for p in model.parameters()),
        full=sum(_multiplied(layer, experts) for layer in full),
        linear=sum(_multiplied(layer, experts) for layer in linear),
        attention=width * len(full),
        widest=3 * spec.intermediate_size,
        hidden_size=spec.hidden_size,
    )


def _multiplied(layer: nn.Module, experts: tuple[int, int]) -> int:
    """Elements of the matrices that one token is multiplied with."""
    count, taken = experts
    total = 0
    for name, parameter in layer.named_parameters():
        if parameter.dim() >= 2 and "conv" not in name:
            share = taken / count if ".experts." in name else 1
            total += round(parameter.numel() * share)
    return total
