"""A conversation as token ids and a loss mask: the tokens that the target would generate.

In: the messages of a row. Out: documents `(ids, loss_mask)`. The chat template is asked only for
what a server would ask it for. For an answer (assistant turn) j:

    prompt   P_j = template(messages[:j], add_generation_prompt=True)
    render   F_j = template(messages[:j+1])           |<------- P_j ------->|<- answer ->|tail|

If F_j continues P_j, the answer is what follows P_j, up to and including the first end-of-turn
token: there the target stops. What P_j supplies (an empty think block) and what the template adds
behind the end of turn (a newline) is no label, and neither is a token across the border.

A template may rewrite history, as by dropping the thinking of earlier turns. An answer counts in a
later render F_k only if F_j up to its end of turn is a prefix of F_k: the target saw these very
tokens. So the last answer makes a document, with all earlier ones that it contains unchanged; the
last of the rest makes the next one; and so on. An append-only template gives one document a row.

Invariants: each answer is supervised in one document or is named in `rejected`; ids are those of
`apply_chat_template(tokenize=True)`; ids and mask are cut together, and nothing is added to them.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from tokenizers import Encoding, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from dflash_ddp.data.conversation import EXTRA_ROLES, Conversation, Rejected

# raise_exception of a template is a jinja2.TemplateError; the others come from its expressions.
TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError)

TOO_FEW = "fewer than two adjacent supervised tokens"
CUT_OFF = "the answer lies behind max_length"
HARMLESS = frozenset({TOO_FEW, CUT_OFF})
"""Reasons that are no sign of bad data: such rows do not count towards `max_bad_share`."""

_PROBE = "dflash7probe"
_PROBE_TEXT = 'Ab  <x>\n\n\té \U0001f600 <|im_end|></s> "1234"'


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """What decides ids and masks besides tokenizer and template.

    Attributes:
        enable_thinking: given to the template; None leaves it to the template's default.
        eos_ids: the target's end-of-turn ids (generation config and tokenizer).
        max_length: most tokens a document keeps.
    """

    enable_thinking: bool | None
    eos_ids: frozenset[int]
    max_length: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """One document.

    Attributes:
        ids: int32 [n].
        loss_mask: bool [n].
        truncated: True if tokens were cut off behind max_length.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    truncated: bool


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """What became of a row: its documents, and why answers were left out (or the whole row)."""

    documents: list[Rendered]
    rejected: list[Rejected]


@dataclass(frozen=True, slots=True)
class _Answer:
    """An assistant turn: its render F_j, where the answer starts, where its end of turn ends."""

    text: str
    start: int
    end: int


class Renderer:
    """A tokenizer with its chat template, ready to render rows.

    Raises:
        ValueError: no fast tokenizer, no chat template, no known end-of-turn id, bad max_length.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: RenderSettings) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is no fast tokenizer: it gives no offsets"
            )
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template")
        if settings.max_length < 2:
            raise ValueError(f"max_length={settings.max_length} must be at least 2")
        self.tokenizer = tokenizer
        self.settings = settings
        self.eos_texts = _eos_texts(tokenizer, settings.eos_ids)
        self._backend = _untrimmed_backend(tokenizer)
        self._drops_role: dict[str, bool] = {}

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool
    ) -> str:
        """The template's text. Raises one of `TEMPLATE_ERRORS` if the template refuses."""
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
        if self.settings.enable_thinking is not None:
            options["enable_thinking"] = self.settings.enable_thinking
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def encode(self, text: str) -> Encoding:
        """Ids and character offsets of a rendered text; no special tokens are added."""
        return self._backend.encode(text, add_special_tokens=False)

    def drops_role(self, role: str) -> bool:
        """True if the template leaves out turns of this role without a word."""
        if role not in self._drops_role:
            question = {"role": "user", "content": "q"}
            answer = {"role": "assistant", "content": "a"}
            probe = {"role": role, "content": _PROBE}
            turns = [question, answer, probe] if role == "tool" else [probe, question]
            try:
                self._drops_role[role] = _PROBE not in self.render(turns, None, prompt=True)
            except TEMPLATE_ERRORS:
                self._drops_role[role] = False  # it does speak up; the row itself will show
        return self._drops_role[role]

    def identity(self) -> str:
        """Hash of all that decides ids and masks: equal identity, equal documents."""
        settings = self.settings
        parts = [
            self._backend.to_str(),
            self.tokenizer.chat_template,
            {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()},
            [settings.enable_thinking, sorted(settings.eos_ids), settings.max_length],
        ]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def render_row(renderer: Renderer, row: Conversation) -> RenderedRow:
    """The documents of a row, in the order of their last answers. Raises for nothing in a row."""
    messages, tools = row.messages, row.tools
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return RenderedRow([], [Rejected("no assistant turn")])
    for role in {message["role"] for message in messages}.intersection(EXTRA_ROLES):
        if renderer.drops_role(role):
            return RenderedRow([], [Rejected(f"the template leaves out the role {role!r}")])
    rejected: list[Rejected] = []
    pending: list[_Answer] = []
    for turn in turns:
        answer = _answer(renderer, messages, tools, turn)
        if isinstance(answer, Rejected):
            rejected.append(answer)
        else:
            pending.append(answer)
    documents: list[Rendered] = []
    while pending:
        last = pending[-1]
        unchanged = [last.text.startswith(answer.text[: answer.end]) for answer in pending]
        inside = [answer for answer, same in zip(pending, unchanged, strict=True) if same]
        pending = [answer for answer, same in zip(pending, unchanged, strict=True) if not same]
        document, refused = _document(renderer, last.text, inside)
        rejected += refused
        if document is not None:
            documents.append(document)
    return RenderedRow(documents[::-1], rejected)


def _answer(
    renderer: Renderer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    turn: int,
) -> _Answer | Rejected:
    if turn == 0:
        return Rejected("the answer has no prompt", "the row starts with an assistant turn")
    try:
        prompt = renderer.render(messages[:turn], tools, prompt=True)
        text = renderer.render(messages[: turn + 1], tools, prompt=False)
    except TEMPLATE_ERRORS as error:
        return Rejected(f"template: {error!s:.80}", f"turn {turn}: {type(error).__name__}: {error}")
    start = len(prompt)
    if not text.startswith(prompt):
        pairs = enumerate(zip(prompt, text, strict=False))
        same = next((char for char, (a, b) in pairs if a != b), len(text))
        detail = f"turn {turn}: prompt {prompt[same:]!r:.50}, render {text[same:]!r:.50}"
        return Rejected("the answer does not continue the generation prompt", detail)
    ends = [found + len(eos) for eos in renderer.eos_texts if (found := text.find(eos, start)) >= 0]
    if not ends:
        detail = f"turn {turn} ends in {text[-40:]!r}, end-of-turn texts: {renderer.eos_texts}"
        return Rejected("the rendered answer has no end-of-turn token", detail)
    return _Answer(text, start, min(ends))


def _document(
    renderer: Renderer, text: str, answers: list[_Answer]
) -> tuple[Rendered | None, list[Rejected]]:
    """Tokens of a text with these answers supervised; None if too little is left of them."""
    encoding = renderer.encode(text)
    max_length, eos_ids = renderer.settings.max_length, renderer.settings.eos_ids
    ids = np.array(encoding.ids, dtype=np.int32)
    loss_mask = np.zeros(len(ids), dtype=bool)
    rejected = []
    num_kept = 0
    for answer in answers:
        first = _first_token(encoding, answer.start)
        last = encoding.char_to_token(answer.end - 1)
        if last is None or int(ids[last]) not in eos_ids:
            detail = f"...{text[answer.end - 40 : answer.end]!r}"
            rejected.append(Rejected("the end-of-turn text is not one token", detail))
            continue
        loss_mask[first : last + 1] = True
        if first < max_length:
            num_kept += 1
        else:
            rejected.append(Rejected(CUT_OFF, f"it starts at token {first}"))
    pairs = loss_mask[:-1] & loss_mask[1:]
    if pairs[: max_length - 1].any():
        truncated = len(ids) > max_length
        return Rendered(ids[:max_length], loss_mask[:max_length], truncated), rejected
    reason = CUT_OFF if pairs.any() else TOO_FEW
    detail = f"{len(ids)} tokens, {loss_mask.sum()} supervised, max_length={max_length}"
    return None, rejected + [Rejected(reason, detail)] * num_kept


def _first_token(encoding: Encoding, char: int) -> int:
    """The first token that starts at this character or later."""
    token = encoding.char_to_token(char)
    while token is None:  # a normaliser dropped the character
        char += 1
        token = encoding.char_to_token(char)
    while (chars := encoding.token_to_chars(token)) is not None and chars[0] < char:
        token += 1
    return token


def _eos_texts(tokenizer: PreTrainedTokenizerFast, eos_ids: frozenset[int]) -> tuple[str, ...]:
    added = tokenizer.added_tokens_decoder
    texts = [
        added[token].content if token in added else str(tokenizer.decode([token]))
        for token in sorted(eos_ids)
        if 0 <= token < len(tokenizer)
    ]
    if not any(texts):
        raise ValueError(f"eos_ids={sorted(eos_ids)}: the tokenizer knows none of these ids")
    return tuple(text for text in texts if text)


def _untrimmed_backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of the tokenizer's backend whose offsets cover every character.

    Post-processors add nothing here (no special tokens are asked for), but some trim spaces off the
    offsets: a space before an answer would then seem to belong to no token or to the wrong side.
    """
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    ids = backend.encode(_PROBE_TEXT, add_special_tokens=False).ids
    expected = tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"]
    if ids != expected:
        raise ValueError(
            f"{type(tokenizer).__name__} changes ids after its backend: {ids} != {expected}; "
            "offsets cannot be trusted"
        )
    return backend
