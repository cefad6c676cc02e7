"""The DFlash drafter: a few Qwen3 layers that read a frozen target's hidden states and fill a block at once.

    context   features [S, C] --fc--> [S, H] --hidden_norm--> ctx           (the same ctx for every layer)
    block     [anchor token, MASK, ..., MASK] --target's embedding--> x [N * B, H]
    layer     queries from the blocks; keys and values `[ctx (S) | block 0 | ... | block N-1]`;
              ctx is projected by the layer's own k_proj and v_proj, without input_layernorm, and is never a query
    output    norm(x) of slots 1..B-1; the target's frozen head turns it into logits

Parameter names are z-lab's, so that `state_dict()` is the published format (3 + 11 tensors a layer). Parameters are
fp32 masters; the module casts them to the dtype of the features itself, so training, evaluation and export agree
without autocast. Products that share an input are merged by concatenating weights on the fly.

Two exact savings: in the first layer every mask slot holds the same row, so N + 1 rows are projected instead of
N * B; in the last layer slot 0, whose output nobody reads, stops after giving its key and value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from dflash_ddp.drafter.attention import MaskRule, attend

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """Everything that determines the drafter's function, given its weights and the target.

    Attributes:
        hidden_size: H, equal to the target's.
        intermediate_size: width of the SwiGLU.
        num_attention_heads: A query heads.
        num_key_value_heads: G key/value heads; divides A.
        head_dim: D.
        num_capture_layers: K; context features are [.., K * H].
        layer_types: `full_attention` or `sliding_attention` for each layer.
        sliding_window: W of sliding layers; None when all layers are full.
        is_causal: inside a block: True or False for all layers; None: sliding layers only.
        rope_theta: base of the rotary frequencies; whole head, half rotation.
        rms_norm_eps: epsilon of every norm.
        initializer_range: standard deviation of fresh matrices.
        block_size: B.
        mask_token_id: row of the target's table that fills slots 1..B-1.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_capture_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    rope_theta: float
    rms_norm_eps: float
    initializer_range: float
    block_size: int
    mask_token_id: int

    @property
    def group(self) -> int:
        """Query heads that share a key head, A / G."""
        return self.num_attention_heads // self.num_key_value_heads

    def mask_rule(self, layer_type: str) -> MaskRule:
        """The mask rule of one kind of layer (z-lab: causal iff sliding, unless `is_causal`)."""
        sliding = layer_type == SLIDING
        causal = sliding if self.is_causal is None else self.is_causal
        return MaskRule(window=self.sliding_window if sliding else None, causal=causal)


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x times several weights at once, cast to x's dtype: one product, outputs side by side."""
    cast = [weight.to(x.dtype) for weight in weights]
    return F.linear(x, cast[0] if len(cast) == 1 else torch.cat(cast))


class RMSNorm(nn.Module):
    """Plain RMS norm over the last dimension, computed in fp32: w * x / rms(x)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in the same dtype."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] in fp32 for half rotation over the whole head."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [heads, T, D] by tables [T, D]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class Attention(nn.Module):
    """Projections and norms of one layer's attention; the same for context and block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        query_width = shape.num_attention_heads * shape.head_dim
        key_width = shape.num_key_value_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def project_block(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [.., H] -> query, key, value rows in one product."""
        widths = [self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features]
        merged = linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        query, key, value = merged.split(widths, dim=-1)
        return query, key, value

    def heads(self, x: Tensor) -> Tensor:
        """[T, heads * D] -> [heads, T, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        # Wide enough to be fast apart; merged, their gradients would have to be laid side by side.
        gate, up = linear(x, self.gate_proj.weight), linear(x, self.up_proj.weight)
        return linear(F.silu(gate) * up, self.down_proj.weight)


class Layer(nn.Module):
    """One drafter layer over blocks; the context enters as ready-made keys and values."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        x_QH: Tensor,
        context_SF: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: BlockMask | Tensor,
        *,
        num_blocks: int,
        first: bool,
        last: bool,
    ) -> Tensor:
        """Blocks [Q, H] (or, in the first layer, N anchor rows and one mask row) -> [Q, H].

        Args:
            x_QH: residual stream of the blocks.
            context_SF: the context's raw keys and values for this layer, [S, 2 * G * D].
            rotary: tables for `[context | blocks]`, [S + Q, D] each.
            mask: see `attend`.
            num_blocks: N.
            first: x holds N + 1 distinct rows still to be spread over the slots.
            last: return slots 1..B-1 only, [N * (B-1), H].
        """
        attention, (cos, sin) = self.self_attn, rotary
        num_slots = len(cos) - len(context_SF)
        query, key, value = attention.project_block(self.input_layernorm(x_QH))
        if first:
            x_QH, query, key, value = (
                spread(rows, num_blocks, num_slots) for rows in (x_QH, query, key, value)
            )
        context_key, context_value = context_SF.chunk(2, dim=-1)
        key = attention.k_norm(attention.heads(torch.cat([context_key, key])))
        value = attention.heads(torch.cat([context_value, value]))
        query = attention.q_norm(attention.heads(query))
        query = rotate(query, cos[-num_slots:], sin[-num_slots:])
        attended = attend(query, rotate(key, cos, sin), value, mask, num_blocks=num_blocks)
        attended = attended.transpose(0, 1).flatten(1)
        if last:
            x_QH, attended = (without_slot_0(rows, num_blocks) for rows in (x_QH, attended))
        x_QH = x_QH + linear(attended, attention.o_proj.weight)
        return x_QH + self.mlp(self.post_attention_layernorm(x_QH))

    def context_weights(self) -> tuple[Tensor, Tensor]:
        """The weights that turn the context into this layer's keys and values."""
        return self.self_attn.k_proj.weight, self.self_attn.v_proj.weight


def spread(rows: Tensor, num_blocks: int, num_slots: int) -> Tensor:
    """N anchor rows and one mask row [N + 1, F] -> the rows of all slots [Q, F]."""
    mask_slots = rows[-1].expand(num_blocks, num_slots // num_blocks - 1, -1)
    return torch.cat([rows[:-1, None], mask_slots], dim=1).flatten(0, 1)


def without_slot_0(rows_QF: Tensor, num_blocks: int) -> Tensor:
    """[N * B, F] -> [N * (B-1), F]."""
    return rows_QF.unflatten(0, (num_blocks, -1))[:, 1:].flatten(0, 1)


class Drafter(nn.Module):
    """The DFlash drafter without embedding and head, which are the target's and stay frozen."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        self.fc = nn.Linear(shape.num_capture_layers * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.layers: Sequence[Layer] = nn.ModuleList([Layer(shape) for _ in shape.layer_types])  # type: ignore[assignment]
        self.norm = RMSNorm(width, shape.rms_norm_eps)

    @classmethod
    def empty(cls, shape: DrafterShape, device: torch.device | str = "cpu") -> "Drafter":
        """Parameters without values, for those who fill them: PyTorch's own take as long as ours."""
        with torch.device("meta"):
            drafter = cls(shape)
        return drafter.to_empty(device=device)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Fresh weights, equal on every rank and device: normal matrices, norms of one."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                fresh = torch.empty(parameter.shape).normal_(
                    0.0, self.shape.initializer_range, generator=generator
                )
                parameter.copy_(fresh)

    def forward(
        self,
        features_SC: Tensor,
        x_XH: Tensor,
        positions_T: Tensor,
        masks: Mapping[str, BlockMask | Tensor],
    ) -> Tensor:
        """Hidden states of slots 1..B-1, ready for the target's head.

        Args:
            features_SC: context features [S, C] in the compute dtype; no gradient flows to them.
            x_XH: embeddings of the N anchor tokens and, last, of the mask token: [N + 1, H].
            positions_T: int positions inside the documents of `[context | slots]`, [S + N * B].
            masks: for each kind of layer, a BlockMask or a dense bool [Q, S + Q].

        Returns:
            [N * (B-1), H] in the compute dtype.
        """
        return self.fill(self.project_context(features_SC), x_XH, positions_T, masks)

    def fill(
        self,
        contexts: Sequence[Tensor],
        x_XH: Tensor,
        positions_T: Tensor,
        masks: Mapping[str, BlockMask | Tensor],
    ) -> Tensor:
        """`forward` from a projected context on: decoding keeps that and adds to it."""
        shape, num_blocks = self.shape, len(x_XH) - 1
        rotary = rotary_tables(positions_T, shape.head_dim, shape.rope_theta)
        for i, (layer, context_SF) in enumerate(zip(self.layers, contexts, strict=True)):
            x_XH = layer(
                x_XH,
                context_SF,
                rotary,
                masks[shape.layer_types[i]],
                num_blocks=num_blocks,
                first=i == 0,
                last=i == len(self.layers) - 1,
            )
        return self.norm(x_XH)

    def project_context(self, features_SC: Tensor) -> tuple[Tensor, ...]:
        """The context's raw keys and values [S, 2 * G * D] for every layer, in one product."""
        context_SH = self.hidden_norm(linear(features_SC, self.fc.weight))
        weights = [w for layer in self.layers for w in layer.context_weights()]
        return linear(context_SH, *weights).chunk(len(self.layers), dim=-1)

    def compile_parts(self) -> None:
        """Compile the context, each layer and the last norm, in place, with static shapes.

        Layers apart rather than the whole at once: as fast, compiled once for equal layers, and
        under DDP the gradients of a layer are reduced while those below are still computed.
        """
        context = torch.compile(self.project_context, fullgraph=True, dynamic=False)
        self.project_context = context  # type: ignore[method-assign]
        for module in (*self.layers, self.norm):
            module.compile(fullgraph=True, dynamic=False)
