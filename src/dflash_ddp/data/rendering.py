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

Invariants: no answer is supervised twice; one that is not supervised is refused with a reason, or
lies behind max_length; ids are those of `apply_chat_template(tokenize=True)`; ids and mask are cut
together, and nothing is added to them.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2
import numpy as np
from tokenizers import Encoding, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from dflash_ddp.data.reading import EXTRA_ROLES, Conversation, Rejected

# raise_exception of a template is a jinja2.TemplateError; the others come from its expressions.
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, ValueError, TypeError, LookupError, ArithmeticError),
    *(AttributeError, RecursionError),
)

TOO_FEW = "fewer than two adjacent supervised tokens"
CUT_OFF = "the answer lies behind max_length"
HARMLESS = frozenset({TOO_FEW, CUT_OFF})
"""Reasons that are no sign of bad data: such rows do not count towards `max_bad_share`."""

_PROBE = 'Ab  <x>\n\n\té \U0001f600 <|im_end|></s> "1234"'


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


class Document(NamedTuple):
    """int32 [n] ids, bool [n] loss mask, and whether tokens were cut off behind max_length."""

    ids: np.ndarray
    loss_mask: np.ndarray
    truncated: bool


class _Answer(NamedTuple):
    """An assistant turn: its render F_j, where the answer starts, where its end of turn ends."""

    text: str
    start: int
    end: int


class Renderer:
    """A tokenizer with its chat template, ready to render rows.

    Raises:
        ValueError: no fast tokenizer, no chat template, or no known end-of-turn id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, settings: RenderSettings) -> None:
        if not getattr(tokenizer, "is_fast", False) or not tokenizer.chat_template:
            name = tokenizer.name_or_path
            raise ValueError(f"the tokenizer {name!r} must be a fast one with a chat template")
        self.tokenizer = tokenizer
        self.settings = settings
        self.eos_texts = _eos_texts(tokenizer, settings.eos_ids)
        self.backend = _untrimmed_backend(tokenizer)
        self.dropped_roles = [role for role in EXTRA_ROLES if self._drops(role)]

    def render(self, row: Conversation, num_turns: int, *, prompt: bool) -> str:
        """The template's text of the first turns. Raises `TEMPLATE_ERRORS` if it refuses."""
        options: dict[str, Any] = {"tools": row.tools, "add_generation_prompt": prompt}
        if self.settings.enable_thinking is not None:
            options["enable_thinking"] = self.settings.enable_thinking
        messages = row.messages[:num_turns]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def identity(self) -> str:
        """Hash of all that decides ids and masks: equal identity, equal documents."""
        settings = self.settings
        parts = [
            self.backend.to_str(),
            self.tokenizer.chat_template,
            {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()},
            [settings.enable_thinking, sorted(settings.eos_ids), settings.max_length],
        ]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _drops(self, role: str) -> bool:
        """True if the template leaves out turns of this role without a word."""
        before = ["user", "assistant"] if role == "tool" else []
        turns = [{"role": r, "content": f"{r}7probe"} for r in (*before, role, "user")]
        try:
            return f"{role}7probe" not in self.render(Conversation(turns), len(turns), prompt=True)
        except TEMPLATE_ERRORS:
            return False  # it does speak up; the row itself will show


def render_row(renderer: Renderer, row: Conversation) -> tuple[list[Document], list[Rejected]]:
    """The documents of a row, in the order of their last answers, and what was refused."""
    roles = [message["role"] for message in row.messages]
    if "assistant" not in roles:
        return [], [Rejected("no assistant turn")]
    for role in renderer.dropped_roles:
        if role in roles:
            return [], [Rejected(f"the template leaves out the role {role!r}")]
    documents: list[Document] = []
    rejected: list[Rejected] = []
    pending: list[_Answer] = []
    for turn, role in enumerate(roles):
        if role == "assistant":
            try:
                pending.append(_answer(renderer, row, turn))
            except Rejected as error:
                rejected.append(error)
    while pending:
        text = pending[-1].text
        inside = [answer for answer in pending if text.startswith(answer.text[: answer.end])]
        pending = [answer for answer in pending if answer not in inside]
        try:
            documents.append(_document(renderer, text, inside))
        except Rejected as error:
            rejected.append(error)
    return documents[::-1], rejected


def _answer(renderer: Renderer, row: Conversation, turn: int) -> _Answer:
    if turn == 0:
        raise Rejected("the answer has no prompt", "the row starts with an assistant turn")
    try:
        prompt = renderer.render(row, turn, prompt=True)
        text = renderer.render(row, turn + 1, prompt=False)
    except TEMPLATE_ERRORS as error:
        raise Rejected(f"template: {error!s:.80}", f"turn {turn}: {error!r}") from None
    start = len(prompt)
    if not text.startswith(prompt):
        pairs = enumerate(zip(prompt, text, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), len(text))
        detail = f"turn {turn}: prompt {prompt[same:]!r:.50}, render {text[same:]!r:.50}"
        raise Rejected("the answer does not continue the generation prompt", detail)
    ends = [found + len(eos) for eos in renderer.eos_texts if (found := text.find(eos, start)) >= 0]
    if not ends:
        detail = f"turn {turn} ends in {text[-40:]!r}, end-of-turn texts: {renderer.eos_texts}"
        raise Rejected("the rendered answer has no end-of-turn token", detail)
    return _Answer(text, start, min(ends))


def _document(renderer: Renderer, text: str, answers: list[_Answer]) -> Document:
    """Tokens of a text with these answers supervised. Raises `Rejected` if too few are."""
    encoding = renderer.backend.encode(text, add_special_tokens=False)
    max_length = renderer.settings.max_length
    ids = np.array(encoding.ids, dtype=np.int32)
    loss_mask = np.zeros(len(ids), dtype=bool)
    for answer in answers:
        last = encoding.char_to_token(answer.end - 1)
        if last is None or int(ids[last]) not in renderer.settings.eos_ids:
            detail = f"...{text[answer.end - 40 : answer.end]!r}"
            raise Rejected("the end-of-turn text is not one token", detail)
        loss_mask[_first_token(encoding, answer.start) : last + 1] = True
    pairs = loss_mask[:-1] & loss_mask[1:]
    if not pairs[: max_length - 1].any():
        detail = f"{len(ids)} tokens, {loss_mask.sum()} supervised, max_length={max_length}"
        raise Rejected(CUT_OFF if pairs.any() else TOO_FEW, detail)
    return Document(ids[:max_length], loss_mask[:max_length], len(ids) > max_length)


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
    ids = backend.encode(_PROBE, add_special_tokens=False).ids
    expected = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    if ids != expected:
        raise ValueError(
            f"{type(tokenizer).__name__} changes ids after its backend: {ids} != {expected}; "
            "offsets cannot be trusted"
        )
    return backend
