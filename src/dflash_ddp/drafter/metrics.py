"""What a step measures, as one vector of sums that lives on the device until it is logged.

    [loss, weights, accepted, full blocks, tokens | correct slots 1..B-1 | supervised slots 1..B-1]

Sums add over microbatches, steps and ranks; ratios are taken once, at the end, from global numerators and
denominators. So the logged loss is the trained one however the rows were split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ddp.drafter.inputs import Inputs
from dflash_ddp.drafter.loss import LossSum

NUM_SCALARS = 5


def empty_sums(block_size: int, device: torch.device) -> Tensor:
    """fp64 zeros [5 + 2 (B-1)]."""
    return torch.zeros(NUM_SCALARS + 2 * (block_size - 1), dtype=torch.float64, device=device)


def right_slots(loss: LossSum, inputs: Inputs) -> Tensor:
    """fp64 [N, B-1]: 1 where a supervised slot's argmax is its label, else 0."""
    rows = inputs.rows
    right_P = (loss.correct_P & (rows.weights_P > 0)).to(torch.float64)
    right_M = torch.zeros(inputs.supervised_NB.numel(), dtype=torch.float64, device=right_P.device)
    return right_M.index_add_(0, rows.slots_P, right_P).view_as(inputs.supervised_NB)


@torch.no_grad()
def microbatch_sums(loss: LossSum, inputs: Inputs, *, weight_sum: float, num_tokens: int) -> Tensor:
    """The vector of one microbatch, without waiting for the device.

    Accept length counts blocks whose B-1 slots are all supervised: the leading run of right
    slots, and the token that the target adds.
    """
    supervised_NB, right_NB = inputs.supervised_NB, right_slots(loss, inputs)
    full_N = supervised_NB.all(dim=1).to(torch.float64)
    accepted_N = (1 + right_NB.cumprod(dim=1).sum(dim=1)) * full_N
    scalars = torch.stack(
        [
            loss.loss_sum.detach().to(torch.float64),
            torch.full_like(full_N[0], weight_sum),
            accepted_N.sum(),
            full_N.sum(),
            torch.full_like(full_N[0], num_tokens),
        ]
    )
    return torch.cat([scalars, right_NB.sum(0), supervised_NB.sum(0, dtype=torch.float64)])


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Ratios of global sums.

    Attributes:
        loss: weighted mean cross-entropy, nats; None without a supervised slot.
        accuracy: share of supervised slots that are right.
        accept_length: teacher-forced, tokens a target call; None without a full block.
        slot_accuracy: for slots 1..B-1; None where no slot was supervised.
        num_tokens: tokens trained on.
    """

    loss: float | None
    accuracy: float | None
    accept_length: float | None
    slot_accuracy: list[float | None]
    num_tokens: int


def step_metrics(sums: list[float]) -> StepMetrics:
    """From the values of a vector, summed over whatever was asked for."""
    loss, weights, accepted, full, tokens = sums[:NUM_SCALARS]
    half = (len(sums) - NUM_SCALARS) // 2
    right, supervised = sums[NUM_SCALARS : NUM_SCALARS + half], sums[NUM_SCALARS + half :]
    return StepMetrics(
        loss=_ratio(loss, weights),
        accuracy=_ratio(sum(right), sum(supervised)),
        accept_length=_ratio(accepted, full),
        slot_accuracy=[_ratio(r, s) for r, s in zip(right, supervised, strict=True)],
        num_tokens=round(tokens),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
