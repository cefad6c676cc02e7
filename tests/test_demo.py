"""The demo under demo/: target, tokenizer, rows and README fit each other and keep their limits."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

DEMO = Path(__file__).resolve().parent.parent / "demo"
MIB = 2**20
MAX_ANSWER_TOKENS = 176
NO_THINKING = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    # The rows were made with the bfloat16 weights in float32, and only then hold token for token.
    return AutoModelForCausalLM.from_pretrained(
        DEMO / "target", local_files_only=True, dtype=torch.float32
    ).eval()


def rows(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (DEMO / name).read_text().splitlines()]


def ids_of(tokenizer, messages, *, ask: bool) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=ask, return_dict=False)


def prompt_and_answer(tokenizer, messages) -> tuple[list[int], list[int]]:
    """Ids of the generation prompt of the last turn, and of its answer with <|im_end|>."""
    prompt = ids_of(tokenizer, messages[:-1], ask=True)
    whole = ids_of(tokenizer, messages, ask=False)
    assert whole[: len(prompt)] == prompt
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = whole[len(prompt) :]
    return prompt, answer[: answer.index(end) + 1]


def module_of(messages: list[dict[str, str]]) -> str:
    found = re.search(r"from `([\w.]+)`:", messages[0]["content"])
    assert found is not None
    return found[1]


def test_sizes_and_format(target, tokenizer):
    files = [path for path in DEMO.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 15 * MIB
    assert sum(p.numel() for p in target.parameters()) <= 6_000_000
    assert type(target) is Qwen3ForCausalLM
    assert target.config.num_hidden_layers >= 6
    assert target.config.vocab_size % 64 == 0
    assert target.config.vocab_size >= len(tokenizer) + 8
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert target.generation_config.eos_token_id == ends
    assert tokenizer.eos_token_id == ends[0]


def test_bytes_survive_the_tokenizer(tokenizer):
    text = "def f(x):\n\treturn '\u00e9\u4e2d\U0001f600'  # 2026\r\n\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_template_renders_as_qwen3(tokenizer):
    first = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nB"},
    ]
    both = [*first, {"role": "user", "content": "C"}]

    def text(messages, *, ask=False, **thinking):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask, **thinking
        )

    start = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(first) == start + "<think>\nhm\n</think>\n\nB<|im_end|>\n"
    asked = start + "B<|im_end|>\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    assert text(both, ask=True) == asked + NO_THINKING
    assert text(both, ask=True, enable_thinking=False) == asked + NO_THINKING
    assert text(both, ask=True, enable_thinking=True) == asked
    with pytest.raises(Exception, match="No user query"):
        text([{"role": "system", "content": "S"}])


def test_rows_parse_and_roles_alternate():
    for name, fewest in (("train.jsonl", 1500), ("heldout.jsonl", 80)):
        found = rows(name)
        assert len(found) >= fewest
        for messages in found:
            assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
            assert all(m["content"].strip() for m in messages)
        two_turns = sum(len(messages) == 4 for messages in found)
        assert 0.05 <= two_turns / len(found) <= 0.2


def test_heldout_shares_no_question_and_no_file_with_train():
    train, heldout = rows("train.jsonl"), rows("heldout.jsonl")
    questions = [messages[0]["content"] for messages in [*train, *heldout]]
    assert len(set(questions)) == len(questions)
    assert not {module_of(m) for m in train} & {module_of(m) for m in heldout}


def test_answers_end_by_themselves_within_the_limit(tokenizer):
    lengths = [
        len(prompt_and_answer(tokenizer, messages)[1])
        for messages in [*rows("train.jsonl")[:100], *rows("heldout.jsonl")]
    ]
    assert max(lengths) <= MAX_ANSWER_TOKENS + 1
    assert 40 <= sum(lengths) / len(lengths) <= 160


@pytest.mark.parametrize("place", range(5))
def test_answer_is_the_targets_greedy_output(target, tokenizer, place):
    found = rows("heldout.jsonl")
    two_turns = next(i for i, messages in enumerate(found) if len(messages) == 4)
    prompt, answer = prompt_and_answer(tokenizer, found[two_turns if place == 4 else place])
    produced = target.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS + 1
    )
    assert produced[0, len(prompt) :].tolist() == answer


@torch.no_grad()
def test_target_is_far_better_than_unigram_on_heldout_answers(target, tokenizer):
    total, counts = 0.0, Counter()
    for messages in rows("heldout.jsonl")[:20]:
        prompt, answer = prompt_and_answer(tokenizer, messages)
        ids = torch.tensor([prompt + answer])
        logits = target(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        total += float(
            torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]) * len(answer)
        )
        counts.update(answer)
    number = sum(counts.values())
    unigram = -sum(n * math.log(n / number) for n in counts.values()) / number
    assert total / number < unigram / 2


def test_readme_states_what_the_build_measured():
    text = (DEMO / "README.md").read_text()
    report = json.loads((DEMO / "build.json").read_text())
    assert "PSF" in text
    for kind, figures in report["losses"].items():
        assert figures["target"] < figures["unigram"] / 2, kind
        for figure in (figures["target"], figures["unigram"]):
            assert f"{figure:.2f}" in text, (kind, figure)
    for name in ("train", "heldout"):
        assert f"{report['rows'][name]['rows']:,}" in text
