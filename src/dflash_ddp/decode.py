"""Speculative decoding with the frozen target, one document at a time: what a server does, in plain steps.

    prefill    the target reads the prompt: features of its tokens, and the first new token
    call       the drafter fills a block behind the newest token; the target reads the block; the leading drafts that
               it agrees with and one token of its own are new; whatever it read beyond them is forgotten

At temperature 0 a draft is accepted if it is the target's argmax, so the output is the target's own greedy output;
above, by rejection sampling, so that it has the target's distribution. Both models keep what they have read. Forgetting
is cutting keys and values; a recurrent state cannot be cut, so it is copied before each call, put back, and the target
reads the accepted tokens once more.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from dflash_ddp.drafter.attention import dense_mask
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.drafter.step import Tables
from dflash_ddp.target.model import decoder_layers


class Reading(NamedTuple):
    """What the target made of L tokens: logits [L, V] (of a prefill [1, V]), features [L, C]."""

    logits_LV: Tensor
    features_LC: Tensor


class TargetReader:
    """The whole frozen target, reading a text piece by piece; it can forget the end of a piece."""

    def __init__(self, model: PreTrainedModel, capture_layers: Sequence[int]) -> None:
        """Register hooks on the capture layers; `model` has its head and returns logits."""
        self.model, self._capture_layers = model, tuple(capture_layers)
        self._captured: dict[int, Tensor] = {}
        base = model.base_model
        assert isinstance(base, PreTrainedModel)
        layers = decoder_layers(base)
        for layer in self._capture_layers:
            layers[layer].register_forward_hook(self._keep_output(layer))
        self.start()

    def _keep_output(self, layer: int) -> Callable[[nn.Module, tuple, Tensor], None]:
        def keep(_module: nn.Module, _args: tuple, hidden_1LH: Tensor) -> None:
            self._captured[layer] = hidden_1LH[0]

        return keep

    def start(self) -> None:
        """Forget everything."""
        self._cache = DynamicCache(config=self.model.config)
        self._ids_L = torch.empty(0, dtype=torch.int64)
        self._recurrent = [
            layer for layer in self._cache.layers if isinstance(layer, LinearAttentionLayer)
        ]
        self._growing = [layer for layer in self._cache.layers if isinstance(layer, DynamicLayer)]
        if len(self._recurrent) + len(self._growing) != len(self._cache.layers):
            raise ValueError(
                f"{type(self.model).__name__} has layers that neither only attend nor only recur: "
                "decoding does not know how such a layer forgets"
            )
        for layer in self._growing:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # or what leaves the window could not come back

    @torch.no_grad()
    def read(self, ids: Sequence[int], *, num_logits: int = 0) -> Reading:
        """Read on; logits of the last `num_logits` tokens, of all if 0."""
        self._ids_L = torch.tensor(ids, device=self.model.device)
        self._before = [
            {name: _copies(getattr(layer, name)) for name in ("conv_states", "recurrent_states")}
            for layer in self._recurrent
        ]
        output = self.model(
            input_ids=self._ids_L[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        features = [self._captured.pop(layer) for layer in self._capture_layers]
        return Reading(output.logits[0], torch.cat(features, dim=-1))

    def keep(self, count: int) -> None:
        """Of the tokens read last, forget all but the first `count` >= 1."""
        dropped = len(self._ids_L) - count
        again = bool(dropped and self._recurrent)
        for layer in self._growing:
            layer.crop(-len(self._ids_L) if again else -dropped)
        if again:
            for recurrent, states in zip(self._recurrent, self._before, strict=True):
                for name, saved in states.items():
                    for index, state in saved.items():
                        getattr(recurrent, name)[index].copy_(state)
            self.read(self._ids_L[:count].tolist(), num_logits=1)
            self.keep(count)


def _copies(states: dict[int, Tensor | None]) -> dict[int, Tensor]:
    return {index: state.clone() for index, state in states.items() if state is not None}


class Drafts(Protocol):
    """What proposes tokens behind the newest one."""

    def start(self) -> None:
        """Forget everything."""

    def read(self, features_LC: Tensor) -> None:
        """Take the features of tokens that are final."""

    def draft(self, anchor: int) -> Tensor:
        """Logits [B-1, V] of the tokens after `anchor`, the newest token, not yet read."""


class DrafterReader:
    """The drafter, keeping the projected context of what it has read."""

    def __init__(self, model: Drafter, tables: Tables) -> None:
        """`model` and `tables` in the compute dtype, on one device."""
        self.model, self.tables = model, tables
        self.start()

    def start(self) -> None:
        """Forget everything."""
        self._contexts: list[Tensor] = []

    @torch.no_grad()
    def read(self, features_LC: Tensor) -> None:
        """Project L tokens' features and keep them."""
        new = self.model.project_context(features_LC.to(self.tables.embedding_VH.dtype))
        kept = self._contexts or [rows[:0] for rows in new]
        self._contexts = [torch.cat(pair) for pair in zip(kept, new, strict=True)]

    @torch.no_grad()
    def draft(self, anchor: int) -> Tensor:
        """One block behind the context: the training layout with a single anchor."""
        shape, device = self.model.shape, self.tables.embedding_VH.device
        place = torch.tensor([len(self._contexts[0])], device=device)
        masks = {
            kind: dense_mask(
                place,
                torch.zeros_like(place),
                context_length=len(self._contexts[0]),
                block_size=shape.block_size,
                rule=shape.mask_rule(kind),
            )
            for kind in dict.fromkeys(shape.layer_types)
        }
        positions_T = torch.arange(len(self._contexts[0]) + shape.block_size, device=device)
        x_XH = self.tables.embedding_VH[torch.tensor([anchor, shape.mask_token_id], device=device)]
        hidden = self.model.fill(self._contexts, x_XH, positions_T, masks)
        return hidden @ self.tables.head_VH.T


class Sampler:
    """How tokens are chosen: the argmax at temperature 0, else at random."""

    def __init__(self, temperature: float = 0.0, generator: torch.Generator | None = None) -> None:
        """`generator` on the models' device; None: torch's own."""
        self.temperature, self._generator = temperature, generator

    def propose(self, logits_LV: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [L] and what they were drawn from [L, V]: probabilities, at temperature 0 logits."""
        if self.temperature == 0:
            return logits_LV.argmax(-1), logits_LV
        probabilities_LV = (logits_LV.float() / self.temperature).softmax(-1)
        return self._draw(probabilities_LV), probabilities_LV

    def judge(self, drafts_D: Tensor, drawn_from_DV: Tensor, logits_LV: Tensor) -> list[int]:
        """The new tokens: accepted drafts and one of the target's own; L = D + 1.

        At temperature 0 a draft is accepted if it is the argmax. Above, draft x is accepted with
        probability min(1, p(x) / q(x)); the first that is not is replaced by a draw from what p has
        in excess of q; after the last, the draw is from p. So each token has the target's
        distribution p, whatever the drafter's q (arXiv 2211.17192).
        """
        own_L, p_LV = self.propose(logits_LV)
        if self.temperature == 0:
            agree_D = drafts_D == own_L[:-1]
        else:
            p_D, q_D = (t.gather(-1, drafts_D[:, None])[:, 0] for t in (p_LV[:-1], drawn_from_DV))
            chance_D = torch.rand(p_D.shape, generator=self._generator, device=p_D.device)
            agree_D = chance_D * q_D < p_D
        accepted = int(agree_D.long().cumprod(0).sum())
        bonus = own_L[accepted]
        if self.temperature > 0 and accepted < len(drafts_D):
            excess_V = (p_LV[accepted] - drawn_from_DV[accepted]).clamp_min(0)
            # Rounding may leave nothing of an excess that is next to nothing.
            bonus = self._draw(torch.where(excess_V.sum() > 0, excess_V, p_LV[accepted]))
        return [*drafts_D[:accepted].tolist(), int(bonus)]

    def _draw(self, probabilities_LV: Tensor) -> Tensor:
        return torch.multinomial(probabilities_LV, 1, generator=self._generator)[..., 0]


class Decoded(NamedTuple):
    """An answer.

    Attributes:
        tokens: new tokens, a stop token included.
        calls: how many of them each target call yielded; the first token came from the prefill.
        seconds: from the first token to the last.
    """

    tokens: list[int]
    calls: list[int]
    seconds: float


def decode(
    target: TargetReader,
    drafter: Drafts | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampler: Sampler | None = None,
) -> Decoded:
    """Decode until a stop token or the limit; without a drafter one token a target call.

    Blocks stay whole at the limit, and what goes beyond it is cut: a shorter block would be another
    question to the drafter.
    """
    sampler = sampler or Sampler()
    target.start()
    logits_1V, features_LC = target.read(prompt, num_logits=1)
    target.keep(len(prompt))
    tokens, calls = sampler.propose(logits_1V)[0].tolist(), []
    if drafter is not None:
        drafter.start()
    start = time.monotonic()
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        drafts_D, drawn_from_DV = logits_1V.new_empty(0, dtype=torch.int64), logits_1V[:0]
        if drafter is not None:
            drafter.read(features_LC)
            drafts_D, drawn_from_DV = sampler.propose(drafter.draft(tokens[-1]))
        logits_LV, features_LC = target.read([tokens[-1], *drafts_D.tolist()])
        new = sampler.judge(drafts_D, drawn_from_DV, logits_LV)
        target.keep(len(new))
        features_LC = features_LC[: len(new)]
        stops = [place for place, token in enumerate(new, 1) if token in stop_ids]
        new = new[: min([*stops, max_new_tokens - len(tokens)])]
        tokens += new
        calls.append(len(new))
    return Decoded(tokens, calls, time.monotonic() - start)
