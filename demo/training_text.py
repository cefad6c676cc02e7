"""Training documents of the target: file pieces and rendered chats, tokenised.

In:  source files and definitions of the training side (stdlib_text.py), the tokenizer.
Out: epochs of documents, each an int array of ids; and held-out documents for measuring.
Invariant: no held-out file is in an epoch. Chats are rendered by the chat template as a whole, so
the target learns the very ids that a user of the template gets.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from byte_bpe import END_OF_TEXT
from chat_tasks import Exchange, conversations
from stdlib_text import Definition, SourceFile
from transformers import PreTrainedTokenizerFast

PIECE_TOKENS = 320


def messages_of(exchanges: Sequence[Exchange]) -> list[dict[str, str]]:
    """Messages of a conversation with the reference answers."""
    return [
        message
        for exchange in exchanges
        for message in (
            {"role": "user", "content": exchange.question},
            {"role": "assistant", "content": exchange.answer},
        )
    ]


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text; special tokens in the text count as special."""
    core = tokenizer.backend_tokenizer
    return [
        np.array(encoded.ids, dtype=np.int64)
        for encoded in core.encode_batch(list(texts), add_special_tokens=False)
    ]


def file_pieces(
    files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerFast
) -> list[np.ndarray]:
    """Files cut into pieces of PIECE_TOKENS; the last piece of a file ends with <|endoftext|>."""
    texts = [f"# {file.module}\n{file.text}{END_OF_TEXT}" for file in files]
    return [
        ids[start : start + PIECE_TOKENS]
        for ids in encode_all(tokenizer, texts)
        for start in range(0, len(ids), PIECE_TOKENS)
        if len(ids) - start > 1
    ]


def chat_documents(
    found: Sequence[Definition], tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> list[np.ndarray]:
    """Rendered conversations about the definitions; the seed moves the places of the cuts."""
    texts = [
        str(tokenizer.apply_chat_template(messages_of(exchanges), tokenize=False))
        for definition in found
        for exchanges in conversations(definition, seed=seed)
    ]
    return encode_all(tokenizer, texts)


def epochs(
    files: Sequence[SourceFile],
    found: Sequence[Definition],
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
) -> Iterator[list[np.ndarray]]:
    """Endless epochs: all chats, with new cuts each time, and every other file piece."""
    pieces = file_pieces([file for file in files if not file.heldout], tokenizer)
    training = [definition for definition in found if not definition.heldout]
    for epoch in itertools.count():
        chats = chat_documents(training, tokenizer, seed=seed + epoch)
        yield [*chats, *pieces[epoch % 2 :: 2]]
