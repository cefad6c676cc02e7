"""Forward and backward of one microbatch: what training runs and the benchmark times."""

import logging
from typing import NamedTuple

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

from dflash_ddp.compiling import require_compiler, require_main_thread
from dflash_ddp.config import LossConfig, PositionWeight, Recompute
from dflash_ddp.drafter.inputs import Inputs
from dflash_ddp.drafter.loss import (
    ChunkFunctions,
    LossSum,
    chunk_loss,
    even_chunk_rows,
    logits_to_grad,
    summed_loss,
)
from dflash_ddp.drafter.model import Drafter

logger = logging.getLogger(__name__)


class Tables(NamedTuple):
    """The target's frozen tables in the compute dtype, [V, H] each; one tensor if tied."""

    embedding_VH: Tensor
    head_VH: Tensor


class LossSettings(NamedTuple):
    """How the loss runs; see `dflash_ddp.drafter.loss`."""

    chunk_rows: int
    recompute: Recompute
    functions: ChunkFunctions = ChunkFunctions()
    dpace_alpha: float | None = None


def loss_settings(config: LossConfig, num_slots: int) -> LossSettings:
    """How the loss of N * (B-1) drafted slots runs, not compiled."""
    dpace = config.position_weight is PositionWeight.dpace
    return LossSettings(
        even_chunk_rows(num_slots, config.chunk_rows),
        config.recompute,
        dpace_alpha=config.dpace_alpha if dpace else None,
    )


def compile_step(model: Drafter) -> ChunkFunctions:
    """Compile the drafter's parts, in place, and the loss's chunks: static shapes, whole graphs.

    Raises:
        RuntimeError: torch.compile is switched off.
    """
    require_compiler()
    recompute_cheap_results()
    model.compile_parts()
    return ChunkFunctions(
        torch.compile(chunk_loss, fullgraph=True, dynamic=False),
        torch.compile(logits_to_grad, fullgraph=True, dynamic=False),
    )


def recompute_cheap_results() -> None:
    """Let code compiled from now on make cheap elementwise results anew in backward.

    A sixth less memory, for less time than can be measured (docs/performance.md). PyTorch's activation_memory_budget
    below 1 does the same to large graphs, but estimates run times in small ones, and fails there at flex attention.
    """
    functorch.ban_recompute_used_far_apart = False
    functorch.ban_recompute_long_fusible_chains = False
    functorch.ban_recompute_materialized_backward = False


def draft(model: nn.Module, tables: Tables, features_SC: Tensor, inputs: Inputs) -> Tensor:
    """Hidden states of the drafted slots, [N * (B-1), H]."""
    require_main_thread("the drafter")
    x_XH = tables.embedding_VH[inputs.token_ids_X]
    return model(features_SC, x_XH, inputs.positions_T, inputs.masks)


def forward(
    model: nn.Module, tables: Tables, features_SC: Tensor, inputs: Inputs, *, loss: LossSettings
) -> LossSum:
    """Draft all blocks and sum the weighted losses of their supervised slots."""
    hidden_MH = draft(model, tables, features_SC, inputs)
    return summed_loss(
        hidden_MH,
        tables.head_VH,
        inputs.rows,
        chunk_rows=loss.chunk_rows,
        recompute=loss.recompute,
        dpace_alpha=loss.dpace_alpha,
        functions=loss.functions,
    )


def forward_backward(
    model: nn.Module,
    tables: Tables,
    features_SC: Tensor,
    inputs: Inputs,
    *,
    scale: Tensor,
    loss: LossSettings,
) -> LossSum:
    """Add the gradient of `scale * loss_sum` to the parameters; NaN if the loss is not finite.

    Args:
        model: the drafter, or DDP around it.
        tables: frozen tables.
        features_SC: context features [S, C] in the compute dtype; rows past n are never seen.
        inputs: the microbatch.
        scale: fp32 scalar on the device: ranks / sum of weights over the whole step.
        loss: how the loss runs.
    """
    result = forward(model, tables, features_SC, inputs, loss=loss)
    # A loss may be infinite with a finite gradient: then all ranks would not see that it is.
    scale = torch.where(result.loss_sum.isfinite(), scale, torch.nan)
    (result.loss_sum * scale).backward()
    return result


def without_gradient(loss: LossSettings) -> LossSettings:
    """The same loss where none is asked for: nothing to take in forward or to recompute."""
    return loss._replace(recompute=Recompute.none)
