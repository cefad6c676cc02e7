"""Chat rows whose answers are the target's own greedy output, each one verified.

In:  the saved target, definitions with their questions (chat_tasks.py).
Out: JSON lines `{"messages": [user, assistant, ...]}`, one or two user turns.
Flow: questions are answered in left-padded batches with a cache, then every row is read again
alone, without cache or padding, in one forward pass.
Invariant of a written row, for each answer: the ids of prompt + answer + <|im_end|> are the ids of
the rendered text; at each answer position the largest logit belongs to the next id, and the second
largest is at least MIN_MARGIN below, so that another machine's float32 gives the same answer.
"""

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from byte_bpe import TURN_END
from chat_tasks import conversations
from stdlib_text import Definition
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

log = logging.getLogger(__name__)

MIN_ANSWER_TOKENS = 24
MAX_ANSWER_TOKENS = 176
MIN_MARGIN = 1e-3
MAX_PROMPT_TOKENS = 480
BATCH_ROWS = 64
ROUND_ROWS = 12 * BATCH_ROWS
TASK_SHARES = {"continue": 0.50, "describe": 0.30, "docstring": 0.08, "two turns": 0.12}
STUTTER = re.compile(r"([^\n]{2,40}?)\1{4,}(?<! )")
Message = dict[str, str]


@dataclass
class Candidate:
    """A conversation in the making: questions, the answers so far, and why it was dropped."""

    kind: str
    questions: list[str]
    answers: list[str] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    dropped: str = ""

    @property
    def messages(self) -> list[Message]:
        """Messages up to the first question without answer, or all."""
        shown: list[Message] = []
        for turn, question in enumerate(self.questions[: len(self.answers) + 1]):
            shown.append({"role": "user", "content": question})
            if turn < len(self.answers):
                shown.append({"role": "assistant", "content": self.answers[turn]})
        return shown


def load_target(folder: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Load the saved bfloat16 weights in float32, as a float32 training run does."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def rendered_ids(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, ask: bool
) -> list[int]:
    """Ids of the rendered messages, with the generation prompt if `ask`."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])


@torch.no_grad()
def answer_batch(
    model: Qwen3ForCausalLM, prompts: Sequence[list[int]], *, pad_id: int
) -> list[list[int]]:
    """Greedy ids for each prompt, up to and with the first end token; left-padded, with cache."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    produced = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS + 1
    )
    ends = set(model.generation_config.eos_token_id)
    answers = []
    for row in produced[:, longest:].tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(row[: stop + 1])
    return answers


@torch.no_grad()
def smallest_margin(model: Qwen3ForCausalLM, prompt: list[int], answer: list[int]) -> float:
    """Smallest lead of the answer's ids over all others; negative where one is not the argmax."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = ids[0, len(prompt) :, None]
    own = logits.gather(1, chosen)[:, 0]
    best_other = logits.scatter(1, chosen, -torch.inf).amax(dim=1)
    return float((own - best_other).min())


def repeats(text: str) -> bool:
    """Whether a line comes too often, or a line's piece follows itself over and over."""
    lines = [line.strip() for line in text.splitlines()]
    counts = Counter(line for line in lines if len(line) >= 8)
    in_a_row = any(
        a == b == c for a, b, c in zip(lines, lines[1:], lines[2:], strict=False) if len(a) >= 3
    )
    in_a_line = STUTTER.search(text) is not None
    return in_a_row or in_a_line or any(count > 3 for count in counts.values())


def settle(
    candidate: Candidate,
    answer: list[int],
    *,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: list[int],
    lenient: bool,
) -> None:
    """Add a verified answer to the candidate, or note why the candidate is dropped."""
    turn_end = tokenizer.convert_tokens_to_ids(TURN_END)
    text = str(tokenizer.decode(answer[:-1]))
    if lenient:
        candidate.answers.append(text)
        candidate.answer_tokens.append(len(answer))
    elif answer[-1] != turn_end:
        candidate.dropped = "did not end"
    elif len(answer) < MIN_ANSWER_TOKENS:
        candidate.dropped = "short"
    elif repeats(text):
        candidate.dropped = "repeats"
    elif smallest_margin(model, prompt, answer) < MIN_MARGIN:
        candidate.dropped = "near tie"
    else:
        candidate.answers.append(text)
        candidate.answer_tokens.append(len(answer))
        ids = rendered_ids(tokenizer, candidate.messages[: 2 * len(candidate.answers)], ask=False)
        if ids[: len(prompt) + len(answer)] != prompt + answer:
            candidate.dropped = "other ids when rendered"


def answer_turn(
    candidates: Sequence[Candidate],
    *,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    lenient: bool,
) -> None:
    """Give every candidate that is not dropped its next answer."""
    waiting = []
    for candidate in candidates:
        prompt = rendered_ids(tokenizer, candidate.messages, ask=True)
        if len(prompt) <= MAX_PROMPT_TOKENS:
            waiting.append((prompt, candidate))
        else:
            candidate.dropped = "long prompt"
    waiting.sort(key=lambda pair: len(pair[0]))
    for start in range(0, len(waiting), BATCH_ROWS):
        group = waiting[start : start + BATCH_ROWS]
        answers = answer_batch(
            model, [prompt for prompt, _ in group], pad_id=tokenizer.pad_token_id
        )
        for (prompt, candidate), answer in zip(group, answers, strict=True):
            settle(
                candidate, answer,
                model=model, tokenizer=tokenizer, prompt=prompt, lenient=lenient,
            )  # fmt: skip


def candidates_of(
    found: Sequence[Definition], *, seed: int, taken: set[str]
) -> dict[str, list[Candidate]]:
    """Shuffled candidates by kind; first questions in `taken` or seen before are left out."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Candidate]] = {kind: [] for kind in TASK_SHARES}
    order = [exchanges for d in found for exchanges in conversations(d, seed=seed)]
    rng.shuffle(order)
    # Two turns first: they are rare, and their first question must not be used up by a single turn.
    for exchanges in sorted(order, key=len, reverse=True):
        if exchanges[0].question in taken:
            continue
        taken.add(exchanges[0].question)
        kind = exchanges[0].task if len(exchanges) == 1 else "two turns"
        by_kind[kind].append(Candidate(kind, [exchange.question for exchange in exchanges]))
    return by_kind


def rounds(by_kind: dict[str, list[Candidate]], *, size: int) -> Iterator[list[Candidate]]:
    """Deal candidates out in rounds of about `size`, by the tasks' shares, until none is left."""
    while any(by_kind.values()):
        dealt = []
        for kind, share in TASK_SHARES.items():
            wanted = max(1, round(size * share))
            dealt += by_kind[kind][:wanted]
            del by_kind[kind][:wanted]
        yield dealt


def build_rows(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    found: Sequence[Definition],
    path: Path,
    *,
    wanted: int,
    seed: int,
    taken: set[str],
    lenient: bool = False,
) -> dict[str, float]:
    """Write up to `wanted` verified rows; returns counts. `taken` gains the questions offered.

    `lenient` takes every answer unchecked: a target of a minute's training never ends an answer.
    """
    quota = {kind: round(wanted * share) for kind, share in TASK_SHARES.items()}
    by_kind = candidates_of(found, seed=seed + 1000, taken=taken)
    rows: list[Candidate] = []
    fates: Counter[str] = Counter()
    for dealt in rounds(by_kind, size=min(ROUND_ROWS, 2 * wanted)):
        live = [c for c in dealt if sum(r.kind == c.kind for r in rows) < quota[c.kind]]
        for turn in range(2):
            answer_turn(
                [c for c in live if not c.dropped and len(c.questions) > turn],
                model=model, tokenizer=tokenizer, lenient=lenient,
            )  # fmt: skip
        for candidate in live:
            fates[candidate.dropped or "kept"] += 1
            if not candidate.dropped and quota[candidate.kind] > sum(
                row.kind == candidate.kind for row in rows
            ):
                rows.append(candidate)
        log.info("%s: %d of %d rows; %s", path.name, len(rows), wanted, dict(fates))
        if all(sum(r.kind == kind for r in rows) >= quota[kind] for kind in quota):
            break
    random.Random(seed).shuffle(rows)
    path.write_text("".join(json.dumps({"messages": row.messages}) + "\n" for row in rows))
    lengths = [length for row in rows for length in row.answer_tokens]
    asked = sum(fates.values()) - fates["long prompt"]
    return {
        "rows": len(rows),
        **{f"rows, {kind}": sum(row.kind == kind for row in rows) for kind in TASK_SHARES},
        "answers": len(lengths),
        "mean answer tokens": round(sum(lengths) / max(1, len(lengths)), 1),
        "share ended by itself": round(1 - fates["did not end"] / max(1, asked), 3),
        **{f"candidates, {fate}": count for fate, count in sorted(fates.items())},
    }
