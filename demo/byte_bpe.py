"""Byte-level BPE tokenizer with Qwen's special tokens and a Qwen-like chat template.

In:  training text of the library.
Out: `PreTrainedTokenizerFast` with NUM_BPE_TOKENS byte-level BPE ids followed by the five added
     tokens. The model's table has TABLE_ROWS rows; the rows from len(tokenizer) on are never used.
Invariant: text -> ids -> text is the identity (byte level, no normaliser).

The template renders as Qwen3's does: an empty think block stands in the last assistant turn and in
the generation prompt, and reasoning is dropped from earlier assistant turns, so the rendering of
turns 1..j is not a prefix of the rendering of turns 1..n. Thinking is off unless
`enable_thinking=True` is given. Tools are not supported.
"""

import logging
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

NUM_BPE_TOKENS = 4096
TABLE_ROWS = 4160
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"

# Qwen's split: contractions, words with one leading sign, single digits, signs, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = r"""
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if ns.last_user < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- if message.content is not string %}
        {{- raise_exception('Content must be a string.') }}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role in ('system', 'user') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_user %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if not (enable_thinking is defined and enable_thinking) %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".strip()


def end_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids at which an answer ends: <|im_end|>, then <|endoftext|>, which also pads."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[TURN_END], vocabulary[END_OF_TEXT]]


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the texts; same texts, same tokenizer."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer=trainer)
    # As in Qwen, the think tokens are added but not special: decoding keeps them.
    core.add_special_tokens(
        [AddedToken(token, special=True) for token in (END_OF_TEXT, TURN_START, TURN_END)]
    )
    core.add_tokens([AddedToken(token, normalized=False) for token in (THINK_START, THINK_END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) <= TABLE_ROWS - 8, "spare rows above the tokenizer are part of the demo"
    log.info("tokenizer: %d ids, %d table rows", len(tokenizer), TABLE_ROWS)
    return tokenizer
