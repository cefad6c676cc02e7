"""Cross-entropy through the target's frozen head, in chunks, so that full logits never exist.

`R` supervised rows out of the N * (B-1) drafted slots reach the head, `chunk_rows` at a time. Rows are padded with
weight 0 to whole chunks, so every chunk has one shape. The result is the *sum* of weighted losses: the caller
divides by the sum of weights over all ranks and microbatches of the step.

A row's gradient is proportional to its weight, so weights are applied after the chunks: they may depend on all
losses of a block, as D-PACE's do (`dpace_factors`), at no further product.

How the backward pass gets its gradient is `loss.recompute`:

    in_forward      the head is frozen, so the gradient of the hidden rows is taken while a chunk's logits are at
                    hand: two products a chunk, nothing of size V is kept
    reentrant       torch.utils.checkpoint(use_reentrant=True): logits computed again in backward, three products
    non_reentrant   the same with use_reentrant=False
    none            each chunk's activations are kept: the plain form, the reference for the others
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_ddp.config import Recompute


class Rows(NamedTuple):
    """Supervised slots, padded to whole chunks; P >= R.

    Attributes:
        slots_P: int64, index into the N * (B-1) drafted slots; 0 in the padding.
        labels_P: int64, true tokens; 0 in the padding.
        weights_P: fp32, position weights; 0 in the padding.
        num_chunks: chunks that hold a supervised row; known on the host.
        num_drafts: drafted slots of a block, B-1.
    """

    slots_P: Tensor
    labels_P: Tensor
    weights_P: Tensor
    num_chunks: int
    num_drafts: int


class LossSum(NamedTuple):
    """Sum of weighted cross-entropies, on the graph, and which rows were right.

    Attributes:
        loss_sum: fp32 scalar.
        correct_P: bool, argmax equals the label; meaningless in the padding.
    """

    loss_sum: Tensor
    correct_P: Tensor


def chunk_loss(hidden_RH: Tensor, head_VH: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: cross-entropies [R] (fp32) and correctness [R]."""
    logits_RV = F.linear(hidden_RH, head_VH).float()
    return F.cross_entropy(logits_RV, labels_R, reduction="none"), logits_RV.argmax(-1) == labels_R


def logits_to_grad(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """As `chunk_loss`, from one chunk's logits; each loss's gradient by its logits takes their place.

    With p = softmax(logits): d loss / d logits = p - onehot(label). Written so that the compiler
    reads the logits twice, with little arithmetic an element, and no second [R, V] exists: the
    label is right if no logit beats its own (of equal ones the first wins, as argmax has it),
    places are int32, and probabilities are products instead of quotients.
    """
    scores_RV = logits_RV.float()
    places_V = torch.arange(scores_RV.shape[-1], device=scores_RV.device, dtype=torch.int32)
    label_places_R1 = labels_R[:, None].int()
    label_scores_R1 = scores_RV.gather(1, labels_R[:, None])
    highest_R1 = scores_RV.amax(-1, keepdim=True)
    sum_R1 = (scores_RV - highest_R1).exp().sum(-1, keepdim=True)
    losses_R = (sum_R1.log() + highest_R1 - label_scores_R1)[:, 0]
    ties_before_RV = (scores_RV == label_scores_R1) & (places_V < label_places_R1)
    beaten_R = ((scores_RV > label_scores_R1) | ties_before_RV).any(-1)
    is_label_RV = (places_V == label_places_R1).float()
    logits_RV.copy_((scores_RV - highest_R1).exp() * sum_R1.reciprocal() - is_label_RV)
    return losses_R, ~beaten_R


def chunk_loss_and_grad(
    hidden_RH: Tensor,
    head_VH: Tensor,
    labels_R: Tensor,
    to_grad: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = logits_to_grad,
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: as `chunk_loss`, and each loss's gradient by its own hidden row [R, H]."""
    logits_RV = F.linear(hidden_RH, head_VH)
    losses_R, correct_R = to_grad(logits_RV, labels_R)
    return losses_R, correct_R, logits_RV @ head_VH


@torch.no_grad()
def dpace_factors(losses_P: Tensor, rows: Rows, num_slots: int, alpha: float) -> Tensor:
    """D-PACE's factors of the position weights [P]: how much of a block hangs on each slot.

    With q = exp(-loss) the drafter's probability of the label (arXiv 2605.18810):

        s_k = (1 - alpha) q_k + alpha      P_k = s_1 ... s_k      W_k = P_k + ... + P_(B-1)

    over the supervised slots of a block; others neither shrink the product nor add to the sum.
    """
    supervised_P = rows.weights_P > 0
    shortfall_P = torch.where(supervised_P, (1 - alpha) * (1 - (-losses_P).exp()), 0.0)

    def by_block(values_P: Tensor) -> Tensor:  # padding repeats slot 0 and adds nothing to it
        flat = values_P.new_zeros(num_slots).index_add_(0, rows.slots_P, values_P)
        return flat.view(-1, rows.num_drafts)

    reached_NB = (1 - by_block(shortfall_P)).cumprod(1) * by_block(supervised_P.float())
    factors_NB = reached_NB.flip(1).cumsum(1).flip(1)
    return factors_NB.reshape(-1)[rows.slots_P]


def even_chunk_rows(num_slots: int, most: int) -> int:
    """Rows of a chunk, at most `most`, so that `num_slots` rows fill their chunks nearly without padding.

    15,360 slots in chunks of at most 4,096 rows: 4 chunks of 3,840, where 4,096 would pad a fifteenth.
    """
    num_chunks = -(-num_slots // most)
    rows = -(-num_slots // num_chunks)
    return min(most, -(-rows // 16) * 16)


class ChunkFunctions(NamedTuple):
    """The two functions that a chunk goes through, plain on CPUs and compiled on GPUs."""

    loss: Callable[..., tuple[Tensor, Tensor]] = chunk_loss
    to_grad: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = logits_to_grad


class _LossInForward(torch.autograd.Function):
    """Loss whose gradient is ready before backward: backward only scales and scatters it."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_MH: Tensor,
        head_VH: Tensor,
        rows: Rows,
        chunk_rows: int,
        dpace_alpha: float | None,
        to_grad: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Run the chunks, weigh their rows, keep only the gradient."""
        losses_P = torch.zeros_like(rows.weights_P)
        correct_P = torch.zeros_like(rows.labels_P, dtype=torch.bool)
        grad_MH = torch.zeros_like(hidden_MH)
        supervised_P1 = (rows.weights_P > 0)[:, None].to(hidden_MH.dtype)
        for part in _chunks(rows, chunk_rows):
            slots = rows.slots_P[part]
            losses_P[part], correct_P[part], grad_RH = chunk_loss_and_grad(
                hidden_MH[slots], head_VH, rows.labels_P[part], to_grad
            )
            # Padding repeats slot 0 with a zero gradient: adding is exact, assigning is not.
            grad_MH.index_add_(0, slots, grad_RH * supervised_P1[part])
        weights_P = _weights(losses_P, rows, len(hidden_MH), dpace_alpha)
        weights_M = torch.zeros_like(grad_MH[:, 0], dtype=torch.float32)
        weights_M.index_add_(0, rows.slots_P, weights_P)
        ctx.save_for_backward(grad_MH.mul_(weights_M[:, None]))  # in fp32, rounded once
        ctx.mark_non_differentiable(correct_P)
        return (losses_P * weights_P).sum(), correct_P

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, scale: Tensor, _correct: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Scale the kept gradient by the incoming one."""
        (grad_MH,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_MH * scale.to(grad_MH.dtype), None, None, None, None, None


def _chunks(rows: Rows, chunk_rows: int) -> list[slice]:
    return [slice(i * chunk_rows, (i + 1) * chunk_rows) for i in range(rows.num_chunks)]


def _weights(losses_P: Tensor, rows: Rows, num_slots: int, dpace_alpha: float | None) -> Tensor:
    if dpace_alpha is None:
        return rows.weights_P
    return rows.weights_P * dpace_factors(losses_P.detach(), rows, num_slots, dpace_alpha)


def summed_loss(
    hidden_MH: Tensor,
    head_VH: Tensor,
    rows: Rows,
    *,
    chunk_rows: int,
    recompute: Recompute,
    dpace_alpha: float | None = None,
    functions: ChunkFunctions = ChunkFunctions(),
) -> LossSum:
    """Sum of weighted cross-entropies of the supervised slots; zero, but on the graph, if none.

    Args:
        hidden_MH: hidden states of the drafted slots [N * (B-1), H].
        head_VH: the target's frozen head, same dtype.
        rows: which slots, which labels, which weights.
        chunk_rows: rows of a chunk; P is a multiple of it.
        recompute: see the file's docstring; all forms give the same gradients.
        dpace_alpha: multiply weights by D-PACE's factors with this alpha; None: as they are.
        functions: the chunk functions to use.
    """
    if recompute is Recompute.in_forward:
        return LossSum(
            *_LossInForward.apply(
                hidden_MH, head_VH, rows, chunk_rows, dpace_alpha, functions.to_grad
            )
        )
    # The zero keeps every parameter on the graph: a rank without labels still joins the reduction.
    losses_P = torch.zeros_like(rows.weights_P) + (hidden_MH[:1] * 0.0).sum().float()
    correct_P = torch.zeros_like(rows.labels_P, dtype=torch.bool)
    for part in _chunks(rows, chunk_rows):
        arguments = (hidden_MH[rows.slots_P[part]], head_VH, rows.labels_P[part])
        if recompute is Recompute.none:
            losses_P[part], correct_P[part] = functions.loss(*arguments)
        else:
            reentrant = recompute is Recompute.reentrant
            losses_P[part], correct_P[part] = checkpoint(
                functions.loss, *arguments, use_reentrant=reentrant
            )
    weights_P = _weights(losses_P, rows, len(hidden_MH), dpace_alpha)
    return LossSum((losses_P * weights_P).sum(), correct_P)
