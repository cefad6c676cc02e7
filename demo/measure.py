"""Losses of the target on held-out text, beside the best unigram loss of the very same tokens.

In:  the target, held-out files and definitions, the held-out rows.
Out: for each kind of text: number of tokens, target loss, unigram loss (nats per token).
Kinds: `source` is raw code of held-out files, `reference answers` are what the library's own text
answers to held-out questions, `own answers` are the target's greedy answers in heldout.jsonl.
The unigram loss is the entropy of the text's own token frequencies: no unigram model does better.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from chat_tasks import conversations
from greedy_rows import Message, rendered_ids
from stdlib_text import Definition, SourceFile
from training_text import file_pieces, messages_of
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

Span = tuple[list[int], int]


def answer_spans(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> Iterator[Span]:
    """For each assistant turn: ids up to its <|im_end|>, and where the answer starts in them."""
    for turn in range(1, len(messages), 2):
        prompt = rendered_ids(tokenizer, messages[:turn], ask=True)
        ids = rendered_ids(tokenizer, messages[: turn + 1], ask=False)
        yield ids[:-1], len(prompt)  # the last id is the line break after <|im_end|>


@torch.no_grad()
def losses(model: Qwen3ForCausalLM, spans: Sequence[Span]) -> dict[str, float]:
    """Mean target loss over the ids from each span's start on, and their unigram loss."""
    total, counts = 0.0, Counter[int]()
    for ids, start in spans:
        tensor = torch.tensor([ids])
        logits = model(input_ids=tensor, use_cache=False).logits[0, start - 1 : -1].float()
        total += float(F.cross_entropy(logits, tensor[0, start:], reduction="sum"))
        counts.update(ids[start:])
    number = sum(counts.values())
    unigram = -sum(count * math.log(count / number) for count in counts.values()) / number
    return {"tokens": number, "target": round(total / number, 4), "unigram": round(unigram, 4)}


def measure(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[SourceFile],
    found: Sequence[Definition],
    *,
    rows: Path,
    num_documents: int,
) -> dict[str, dict[str, float]]:
    """Losses of the three kinds of held-out text.

    Each is an even sample of at least `num_documents` documents and fewer than twice as many, or
    all there are.
    """
    pieces = file_pieces([file for file in files if file.heldout], tokenizer)
    source = [(piece.tolist(), 1) for piece in pieces]
    references = [
        span
        for definition in found
        if definition.heldout
        for exchanges in conversations(definition, seed=0)
        for span in answer_spans(tokenizer, messages_of(exchanges))
    ]
    own = [
        span
        for line in rows.read_text().splitlines()
        for span in answer_spans(tokenizer, json.loads(line)["messages"])
    ]
    kinds = {"source": source, "reference answers": references, "own answers": own}
    return {
        kind: losses(model, spans[:: max(1, len(spans) // num_documents)])
        for kind, spans in kinds.items()
        if spans
    }
