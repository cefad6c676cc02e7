"""Packed batch in, context features out: what the drafter reads of the target.

    packed batch   | document 0    | document 1 | document 2         |   S tokens, end to end
    row groups     [document 2         ]    [document 1 ..]              one document a row
                   [document 0 ....    ]                                 pads (dots) on the right
    features_SC    | document 0    | document 1 | document 2         |   C = K * H, packed again

Each document is a row of its own and pads come after every real token, so nothing leaks between
documents, whatever a layer mixes tokens with: causal attention, recurrent state or convolution.
Hooks on the captured layers copy the real tokens of each row straight into the packed features.
Column block l holds the output of decoder layer `capture_layers[l]`, which transformers calls
`hidden_states[id + 1]`.

Invariant: the features of a document depend on that document alone. The GPU is asked no question.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_ddp.batch import PackedBatch
from dflash_ddp.target.model import decoder_layers, transformers_forward

logger = logging.getLogger(__name__)

LENGTH_MULTIPLE = 16  # of the shorter rows
RUNGS_PER_OCTAVE = 16
GROUP_COST_TOKENS = 256  # what a forward costs beside its tokens (launches, weights), in tokens
CHECK_MIN_TOKENS = 32
# Mean relative error that rounding may cause after n layers, divided by the root of n. Seen on random
# weights in bf16 with compiled layers: 0.012 (Qwen3-8B and Qwen3.6-27B shapes, n = 2 to 62).
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 0.03}


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Documents that share a forward: ordinals in the batch, one a row, and the row length."""

    documents: tuple[int, ...]
    length: int


def padded_length(length: int) -> int:
    """The shortest rung that holds `length` tokens.

    Rungs are the multiples of 16 up to 512, then 16 an octave: few shapes, and less than 1/16
    padding for any document longer than 256 tokens.
    """
    step = LENGTH_MULTIPLE
    while length > 2 * RUNGS_PER_OCTAVE * step:
        step *= 2
    return -(-length // step) * step


def plan_rows(document_lengths: Sequence[int], *, max_row_tokens: int) -> list[RowGroup]:
    """Group documents into forwards of at most `max_row_tokens` padded tokens.

    A longer document goes alone. Documents are sorted by length and cut where padded tokens plus
    `GROUP_COST_TOKENS` a forward are least, so lengths mix only where that is cheaper than another
    forward. Waste with 16,384 row tokens and batches of 49,152 tokens: none for equal
    documents, 3 to 6% for mixed lengths of 16 to 4,096 tokens, 30% for lengths of 8 to 40.

    Raises:
        ValueError: a document without tokens.
    """
    if min(document_lengths, default=1) < 1:
        raise ValueError(f"every document needs a token; lengths are {list(document_lengths)}")
    order = sorted(range(len(document_lengths)), key=lambda i: -document_lengths[i])
    padded = [padded_length(document_lengths[i]) for i in order]
    # Of the `end` longest documents: the least cost, and where its last group starts.
    cost, cut = [0], [0]
    for end in range(1, len(order) + 1):
        cost.append(cost[end - 1] + padded[end - 1] + GROUP_COST_TOKENS)
        cut.append(end - 1)
        for start in range(end - 2, -1, -1):
            row_tokens = (end - start) * padded[start]
            if row_tokens > max_row_tokens:
                break
            if cost[start] + row_tokens + GROUP_COST_TOKENS < cost[end]:
                cost[end], cut[end] = cost[start] + row_tokens + GROUP_COST_TOKENS, start
    groups, end = [], len(order)
    while end > 0:
        groups.append(RowGroup(tuple(order[cut[end] : end]), padded[cut[end]]))
        end = cut[end]
    return groups[::-1]


class Target:
    """A frozen target, as `load_target` returns it, with hooks on its captured layers."""

    def __init__(
        self, model: PreTrainedModel, capture_layers: Sequence[int], *, max_row_tokens: int = 16384
    ) -> None:
        """Register the hooks; they do nothing outside `features`.

        The order of `capture_layers` is that of the features. A forward has at most
        `max_row_tokens` tokens, padding included.
        """
        layers = decoder_layers(model)
        assert len(layers) == max(capture_layers) + 1, "the target must end at the last layer read"
        self.model = model
        self.capture_layers = tuple(capture_layers)
        self.max_row_tokens = max_row_tokens
        table_VH = model.get_parameter("embed_tokens.weight")
        self.device: torch.device = table_VH.device
        self.table_rows, self.hidden_size = table_VH.shape
        # While a group runs: where the hooks write, and (start, length) in the batch of each row.
        self._destination: tuple[Tensor, list[tuple[int, int]]] | None = None
        for ordinal, layer in enumerate(self.capture_layers):
            layers[layer].register_forward_hook(self._copy_hook(self.columns(ordinal)))

    @property
    def feature_width(self) -> int:
        """C = K * H."""
        return len(self.capture_layers) * self.hidden_size

    def columns(self, ordinal: int) -> slice:
        """Where the features hold the output of `capture_layers[ordinal]`."""
        return slice(ordinal * self.hidden_size, (ordinal + 1) * self.hidden_size)

    def features(self, batch: PackedBatch, out_SC: Tensor) -> None:
        """Write the context features of `batch` into `out_SC[:n]`; queued on the GPU, not awaited.

        Args:
            batch: n tokens; only ids and document lengths matter.
            out_SC: at least n rows, C columns, on the target's device; other rows are left alone.

        Raises:
            ValueError: `out_SC` does not fit, or a token id has no row in the target's table.
        """
        self._check(batch, out_SC)
        lengths = batch.document_lengths.tolist()
        starts = (np.cumsum(batch.document_lengths) - batch.document_lengths).tolist()
        groups = plan_rows(lengths, max_row_tokens=self.max_row_tokens)
        rows = [[(starts[d], lengths[d]) for d in group.documents] for group in groups]
        sizes = [len(group.documents) * group.length for group in groups]
        ids = torch.from_numpy(_padded_ids(batch.input_ids, groups, rows))
        if self.device.type == "cuda":
            ids = ids.pin_memory()  # only pinned memory can be copied without a wait
        ids = ids.to(self.device, non_blocking=True)
        with torch.no_grad():
            for group, group_rows, group_ids in zip(groups, rows, ids.split(sizes), strict=True):
                self._destination = (out_SC, group_rows)
                try:
                    self.model(input_ids=group_ids.view(-1, group.length), use_cache=False)
                finally:
                    self._destination = None

    def _copy_hook(self, columns: slice) -> Callable[[nn.Module, tuple, Tensor], None]:
        """A hook that copies the real tokens of each row to `columns` of the features."""

        def copy_rows(_module: nn.Module, _args: tuple, hidden_RLH: Tensor) -> None:
            if self._destination is None:
                return
            out_SC, rows = self._destination
            for hidden_LH, (start, length) in zip(hidden_RLH, rows, strict=True):
                out_SC[start : start + length, columns].copy_(hidden_LH[:length])

        return copy_rows

    def _check(self, batch: PackedBatch, out_SC: Tensor) -> None:
        """Refuse what would land out of place, or fail on the GPU without a message."""
        num_tokens, ids = batch.num_tokens, batch.input_ids
        fits = out_SC.ndim == 2 and out_SC.shape[0] >= num_tokens
        if not fits or out_SC.shape[1] != self.feature_width or out_SC.device != self.device:
            raise ValueError(
                f"features of batch {batch.index} need [>={num_tokens}, {self.feature_width}] on "
                f"{self.device}; the buffer is {list(out_SC.shape)} on {out_SC.device}"
            )
        assert num_tokens == batch.document_lengths.sum(), "documents must cover the batch"
        if num_tokens and not 0 <= ids.min() <= ids.max() < self.table_rows:
            raise ValueError(
                f"batch {batch.index} has token ids {ids.min()}..{ids.max()}, but the target's "
                f"table has {self.table_rows} rows. Was the data tokenised for another target?"
            )


def compile_rows(target: Target) -> None:
    """Run a row alone and two rows together: the two shapes that compiled layers tell apart."""
    for lengths in ((48,), (48, 48)):
        num_tokens = sum(lengths)
        ids = np.arange(num_tokens, dtype=np.int32) % target.table_rows
        batch = PackedBatch(
            index=-1,
            input_ids=ids,
            positions=ids,
            loss_mask=np.zeros(num_tokens, dtype=bool),
            document_lengths=np.array(lengths, dtype=np.int32),
            document_ids=np.arange(len(lengths)),
        )
        shape = (num_tokens, target.feature_width)
        out_SC = torch.empty(shape, dtype=target.model.dtype, device=target.device)
        target.features(batch, out_SC)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _padded_ids(
    input_ids: np.ndarray, groups: Sequence[RowGroup], rows: Sequence[Sequence[tuple[int, int]]]
) -> np.ndarray:
    """The rows of all groups end to end, padded with id 0 (any id would do), int64."""
    blocks = []
    for group, group_rows in zip(groups, rows, strict=True):
        block = np.zeros((len(group_rows), group.length), dtype=np.int64)
        for row, (start, length) in zip(block, group_rows, strict=True):
            row[:length] = input_ids[start : start + length]
        blocks.append(block.ravel())
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)


def check_features(target: Target, batch: PackedBatch, features_SC: Tensor) -> float:
    """Compare features with a plain transformers forward of one document alone; for a first batch.

    The document is a short one that has another before it, so that a leak shows. The plain forward
    knows nothing of our rows, hooks, attention or compiled layers. Waits for the GPU.

    Returns:
        The largest over the captured layers of the mean relative error of a token.

    Raises:
        ValueError: features not finite, constant or too far off; names the layer and the numbers.
    """
    document = _document_to_check(batch.document_lengths)
    start = int(batch.document_lengths[:document].sum())
    end = start + int(batch.document_lengths[document])
    ids_1L = torch.from_numpy(batch.input_ids[None, start:end].astype(np.int64)).to(target.device)
    with torch.no_grad(), transformers_forward(target.model):
        plain = target.model(input_ids=ids_1L, use_cache=False, output_hidden_states=True)
    per_root = max(TOLERANCE[target.model.dtype], TOLERANCE[features_SC.dtype])
    errors = []
    for ordinal, layer in enumerate(target.capture_layers):
        where = f"context features of layer {layer}, batch {batch.index}"
        tolerance = per_root * (layer + 1) ** 0.5
        features_NH = features_SC[: batch.num_tokens, target.columns(ordinal)]
        _check_values(features_NH, where)
        expected_LH = plain.hidden_states[layer + 1][0].float()
        difference_L = (features_NH[start:end].float() - expected_LH).norm(dim=-1)
        # Token by token: in a total, one token of huge norm (an attention sink) hides all others.
        errors.append(float((difference_L / expected_LH.norm(dim=-1).clamp_min(1e-12)).mean()))
        if not errors[-1] <= tolerance:
            raise ValueError(
                f"{where}: document {document} differs from a plain forward of it alone by "
                f"{errors[-1]:.3g} (mean relative error, allowed {tolerance:.3g}). Documents leak "
                "into each other, or a layer or row is out of place."
            )
    logger.info("context features equal a plain forward to %.2g (mean relative error)", max(errors))
    return max(errors)


def _document_to_check(lengths: np.ndarray) -> int:
    """The shortest document after the first of at least `CHECK_MIN_TOKENS`, else the longest."""
    candidates = range(1, len(lengths)) if len(lengths) > 1 else range(1)
    short = lengths < CHECK_MIN_TOKENS
    return min(candidates, key=lambda d: (short[d], -lengths[d] if short[d] else lengths[d]))


def _check_values(features_NH: Tensor, where: str) -> None:
    """Refuse values that are not finite, or the same for every token."""
    low_H, high_H = features_NH.amin(dim=0), features_NH.amax(dim=0)  # both carry NaN along
    if not bool((low_H.isfinite() & high_H.isfinite()).all()):
        num_bad = int((~features_NH.isfinite()).any(dim=-1).sum())
        raise ValueError(
            f"{where}: {num_bad} of {len(features_NH)} tokens hold NaN or infinite values. "
            "Check the target's weights and target.dtype."
        )
    if len(features_NH) > 1 and bool((low_H == high_H).all()):
        raise ValueError(
            f"{where}: all {len(features_NH)} tokens have the same values, "
            f"{float(low_H.min()):.3g}..{float(high_H.max()):.3g}. Nothing was captured."
        )
