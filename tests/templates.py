"""Chat templates of every kind that is met, and a small tokenizer that has one."""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"]
IM_END, END_OF_TEXT = 1, 2
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EOS_IDS = frozenset({IM_END, END_OF_TEXT})

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Qwen3's: thinking of turns before the last question is dropped, later answers without thinking
# get an empty block, and enable_thinking=False puts that block into the generation prompt.
QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role in ['user', 'system'] %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}
            {%- if call.arguments is string %}{{- call.arguments }}
            {%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# As Qwen3.5's: insists on a question, and opens the thinking in the prompt.
STRICT = """{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}{{- m.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# As Llama's: prints the BOS that the tokenizer would add as well; refuses other orders of roles.
BOS = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must alternate') }}{%- endif %}
{{- '[' + m.role + ']' + m.content | trim + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# Ends the last turn in another way than the earlier ones, and with no newline behind it.
LAST_DIFFERS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|endoftext|>{% else %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Newlines between turns only, none behind the last: renders of prefixes are no prefixes.
BETWEEN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"""

# A closing token after the end of turn, behind the last turn only.
CLOSING = PLAIN.replace("{% endfor %}", "{% if loop.last and m.role == 'assistant' %}"
                        "<|endoftext|>{% endif %}{% endfor %}")  # fmt: skip

TEMPLATES = {
    "plain": PLAIN,
    "qwen3": QWEN3,
    "strict": STRICT,
    "bos": BOS,
    "last_differs": LAST_DIFFERS,
    "between": BETWEEN,
    "closing": CLOSING,
}

TEXT = (
    "The user asks and the assistant answers: a short question, then a longer reply with numbers "
    "1234 and signs (x + y) * 2.\n\n<think>\nLet me think about it.\n</think>\n\nÀ la carte, naïve "
    "café — 東京 \U0001f600.\n    indented code = [1, 2]\nand\n\nthen\n\nmore"
)


def make_tokenizer(
    template: str, *, bos: bool = False, trim: bool = True
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges over newlines, think tags as tokens and, if asked, a BOS rule."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_words])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    steps: list = [processors.ByteLevel(trim_offsets=trim)]
    if bos:
        steps.append(processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)]))
    backend.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer
