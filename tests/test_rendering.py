"""Masks against an oracle that serves: ids of the prompt alone, then the ids generated after it."""

import functools
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
from templates import END_OF_TEXT, EOS_IDS, IM_END, PLAIN, TEMPLATES, TEXT, make_tokenizer
from tokenizers import AddedToken

from dflash_ddp.data.reading import Conversation
from dflash_ddp.data.rendering import CUT_OFF, TOO_FEW, Renderer, RenderSettings, render_row


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make_tokenizer(text, bos=name == "bos") for name, text in TEMPLATES.items()}


def make_renderer(tokenizer, *, mode=None, eos_ids=EOS_IDS, max_length=10_000) -> Renderer:
    return Renderer(tokenizer, RenderSettings(mode, frozenset(eos_ids), max_length))


cached_renderer = functools.cache(make_renderer)


def chat(*turns: str, start: str = "user", system: str | None = None) -> list[dict]:
    """Turns of user and assistant in alternation."""
    roles = ["user", "assistant"] if start == "user" else ["assistant", "user"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return ([{"role": "system", "content": system}] if system is not None else []) + messages


def served(tokenizer, messages, mode, tools=None) -> list[tuple]:
    """For each answer that a server could give: (ids of its prompt alone, ids generated)."""
    options = {"tools": tools} | ({} if mode is None else {"enable_thinking": mode})
    pairs = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0:
            continue
        prompt = ids_of(tokenizer, messages[:turn], add_generation_prompt=True, **options)
        whole = ids_of(tokenizer, messages[: turn + 1], **options)
        if whole[: len(prompt)] != prompt:
            continue
        answer = whole[len(prompt) :]
        end = next(i for i, token in enumerate(answer) if token in EOS_IDS)
        pairs.append((tuple(prompt), tuple(answer[: end + 1])))
    return pairs


def ids_of(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, **options)["input_ids"]


def supervised(documents) -> list[tuple]:
    """For each run of supervised tokens: (all ids before it, its ids)."""
    pairs = []
    for document in documents:
        assert document.ids.dtype == np.int32
        assert document.loss_mask.dtype == bool
        assert len(document.ids) == len(document.loss_mask)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], document.loss_mask, [0]])))
        ids = document.ids.tolist()
        pairs += [(tuple(ids[:a]), tuple(ids[a:b])) for a, b in edges.reshape(-1, 2)]
    return pairs


def render(tokenizer, messages, tools=None, **options):
    """Documents and refusals of a row."""
    renderer = cached_renderer(tokenizer, **options)
    documents, rejected = render_row(renderer, Conversation(messages, tools))
    return SimpleNamespace(documents=documents, rejected=rejected)


def random_chat(rng: random.Random, *, thinking: bool) -> list[dict]:
    pieces = [*TEXT.split(" "), "\n", "\n\n", "  ", "\t", "\U0001f600", "<", "</s>", "ends\n", "é"]
    messages = []
    for turn in range(rng.randint(1, 7)):
        text = " ".join(rng.choices(pieces, k=rng.randint(2, 12)))
        text = text.replace("<think>", "").replace("</think>", "")
        text = text.lstrip() or "x"  # newlines that merge with the prompt's: another test
        message = {"role": "assistant" if turn % 2 else "user", "content": text}
        if turn % 2 and thinking and rng.random() < 0.7:
            message["reasoning_content"] = text[: rng.randint(1, 9)]
        messages.append(message)
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "s"})
    return messages


@pytest.mark.parametrize("mode", [None, True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_is_supervised_once_and_exactly_as_served(tokenizers, name, mode):
    """Context ids and supervised ids, for random conversations, against the serving oracle."""
    rng = random.Random(f"{name}{mode}")
    tokenizer = tokenizers[name]
    num_answers = 0
    for _ in range(40):
        messages = random_chat(rng, thinking=mode is not False)
        if name == "bos":
            messages = [m for m in messages if m["role"] != "system"]
        if name == "strict" and mode is not False:
            # An empty thought merges with the newline of the prompt: another test.
            for message in messages:
                message.setdefault("reasoning_content", "hm")
        result = render(tokenizer, messages, mode=mode)
        expected = served(tokenizer, messages, mode)
        assert sorted(supervised(result.documents)) == sorted(expected)
        answers = sum(m["role"] == "assistant" for m in messages)
        assert len(expected) + len([r for r in result.rejected if answers]) == answers
        num_answers += len(expected)
    assert num_answers > 25


def test_append_only_rows_are_one_document_of_the_whole_render(tokenizers):
    for name in ("plain", "bos", "between"):
        messages = chat("q one", "a one", "q two", "a two", "q three", "a three")
        (document,) = render(tokenizers[name], messages).documents
        assert document.ids.tolist() == ids_of(tokenizers[name], messages)
        assert len(supervised([document])) == 3


def test_rows_with_rewritten_history_fan_out_and_lose_no_answer(tokenizers):
    """A template that strips earlier thinking gives each such answer the context it was made in."""
    tokenizer = tokenizers["qwen3"]
    messages = chat("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
    final = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "t1" not in final
    first, second = render(tokenizer, messages, mode=True).documents
    assert [tokenizer.decode(answer) for _, answer in supervised([first])] == [
        "<think>\nt1\n</think>\n\na1<|im_end|>"
    ]
    assert second.ids.tolist() == ids_of(tokenizer, messages)
    assert "t1" not in tokenizer.decode(second.ids)


def test_answers_that_share_a_history_share_a_document(tokenizers):
    """Turns after the last question keep their thinking: calls and final answer stay together."""
    tokenizer = tokenizers["qwen3"]

    def work(name):
        call = {"arguments": {"x": name}}
        return [
            {"role": "user", "content": f"q{name}"},
            {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [call]},
            {"role": "tool", "content": f"r{name}"},
            {"role": "assistant", "content": f"a{name}", "reasoning_content": "u"},
        ]

    messages = work("1") + work("2") + [{"role": "user", "content": "thanks"}]
    result = render(tokenizer, messages, mode=True)
    assert [len(supervised([document])) for document in result.documents] == [2, 2]
    assert sorted(supervised(result.documents)) == sorted(served(tokenizer, messages, True))
    assert "thanks" not in tokenizer.decode(result.documents[-1].ids)


def test_what_the_prompt_supplies_is_no_label(tokenizers):
    tokenizer = tokenizers["qwen3"]
    (document,) = render(tokenizer, chat("q", "answer"), mode=False).documents
    text = tokenizer.decode(document.ids)
    assert "<think>\n\n</think>\n\nanswer" in text
    assert [tokenizer.decode(answer) for _, answer in supervised([document])] == [
        "answer<|im_end|>"
    ]
    (document,) = render(tokenizer, chat("q", "answer"), mode=True).documents
    assert tokenizer.decode(supervised([document])[0][1]).startswith("<think>")


def test_an_answer_that_the_prompt_excludes_is_refused(tokenizers):
    """Thinking in the data, no thinking in the mode: no server would have given this answer."""
    messages = chat("q", "<think>\nt\n</think>\n\na b")
    result = render(tokenizers["qwen3"], messages, mode=False)
    assert result.documents == []
    assert "does not continue" in result.rejected[0].reason
    assert "'t" in result.rejected[0].detail
    result = render(tokenizers["qwen3"], messages + chat("q2", "a b"), mode=False)
    assert len(result.documents) == len(result.rejected) == 1


def test_a_control_token_in_an_answer_ends_it_as_it_would_end_serving(tokenizers):
    (document,) = render(tokenizers["plain"], chat("q", "one<|endoftext|>two")).documents
    ((_, answer),) = supervised([document])
    assert tokenizers["plain"].decode(answer) == "one<|endoftext|>"


@pytest.mark.parametrize("trim", [True, False])
def test_a_token_across_the_border_is_not_supervised(trim):
    """The prompt ends in a space that joins the first word, whatever the offsets say."""
    template = """{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}
    {%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
    tokenizer = make_tokenizer(template, trim=trim)
    (document,) = render(tokenizer, chat("q", "the reply with numbers")).documents
    ((before, answer),) = supervised([document])
    assert tokenizer.decode(before).endswith("assistant: the")
    assert tokenizer.decode(answer) == " reply with numbers<|im_end|>"
    # A space that stays a token of its own belongs to the prompt, and costs no label.
    (document,) = render(tokenizer, chat("q", "~ x y")).documents
    ((before, answer),) = supervised([document])
    assert tokenizer.decode(answer) == "~ x y<|im_end|>"


def test_newlines_that_merge_across_the_border_are_not_supervised(tokenizers):
    """The prompt opens the thinking with a newline, the empty thought adds one: one token."""
    tokenizer = tokenizers["strict"]
    pair = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    messages = chat("q", "a b")
    (document,) = render(tokenizer, messages, mode=True).documents
    assert document.ids.tolist() == ids_of(tokenizer, messages, enable_thinking=True)
    ((_, answer),) = supervised([document])
    assert len(pair) == 1
    assert tokenizer.decode(answer).startswith("</think>")


def test_end_tokens_that_swallow_spaces():
    """Added tokens with rstrip, as some tokenizers have, take the newline behind them."""
    tokenizer = make_tokenizer(PLAIN.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)], special_tokens=True)
    eos = tokenizer.convert_tokens_to_ids("<|end|>")
    result = render(tokenizer, chat("q", "a b", "q", "c d"), eos_ids=frozenset({eos}))
    (document,) = result.documents
    runs = supervised([document])
    assert len(runs) == 2
    assert all(answer[-1] == eos for _, answer in runs)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("mode", [True, False])
def test_cut_at_max_length(tokenizers, name, mode):
    """Ids and mask are cut at one place, no end is invented, the flag comes from the cut."""
    tokenizer = tokenizers[name]
    messages = chat("q", " ".join(f"w{i}" for i in range(40)))
    (whole,) = render(tokenizer, messages, mode=mode).documents
    last = int(np.flatnonzero(whole.loss_mask)[-1])
    for max_length in [*range(2, len(whole.ids) + 3), last, last + 1, last + 2]:
        result = render(tokenizer, messages, mode=mode, max_length=max_length)
        if whole.loss_mask[:max_length].sum() < 2:
            assert result.documents == []
            assert [rejected.reason for rejected in result.rejected] == [CUT_OFF]
            continue
        (document,) = result.documents
        assert document.ids.tolist() == whole.ids[:max_length].tolist()
        assert document.loss_mask.tolist() == whole.loss_mask[:max_length].tolist()
        assert document.truncated == (max_length < len(whole.ids))


def test_answers_behind_the_cut_cost_no_other(tokenizers):
    messages = chat("q", "a b c", "q " * 30, "d e f")
    result = render(tokenizers["plain"], messages, max_length=20)
    assert len(supervised(result.documents)) == 1
    assert result.documents[0].truncated


def test_short_and_late_answers(tokenizers):
    """Two supervised tokens make a document wherever they stand; one makes none."""
    tokenizer = tokenizers["plain"]
    (document,) = render(tokenizer, chat("q " * 200, "x")).documents
    assert document.loss_mask.sum() == 2
    for turns in (("q", ""), ("q", "", "q", "", "q", "")):
        result = render(tokenizer, chat(*turns))
        assert result.documents == []
        assert [rejected.reason for rejected in result.rejected] == [TOO_FEW]
    assert len(render(tokenizer, chat("q", "", "q", "x")).documents) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_that_no_template_can_use(tokenizers, name):
    reasons = []
    for messages in ([], chat(system="s"), chat("q"), chat("a b", "q", start="assistant")):
        result = render(tokenizers[name], messages)
        assert result.documents == []
        reasons += [rejected.reason for rejected in result.rejected]
    assert reasons == ["no assistant turn"] * 3 + ["the answer has no prompt"]


def test_refusals_of_the_template_carry_its_message(tokenizers):
    result = render(tokenizers["bos"], [*chat("q"), *chat("q", "a b")])
    assert result.rejected[0].reason == "template: Roles must alternate"
    # Only the answer without a question is lost, not the row.
    messages = [{"role": "system", "content": "s"}, *chat("a b", "q", "c d", start="assistant")]
    result = render(tokenizers["strict"], messages, mode=False)
    assert [rejected.reason for rejected in result.rejected] == [
        "template: No user query found in messages."
    ]
    assert sorted(supervised(result.documents)) == served_last(tokenizers["strict"], messages)


def served_last(tokenizer, messages):
    prompt = ids_of(tokenizer, messages[:-1], add_generation_prompt=True, enable_thinking=False)
    whole = ids_of(tokenizer, messages, enable_thinking=False)
    return [(tuple(prompt), tuple(whole[len(prompt) : whole.index(IM_END, len(prompt)) + 1]))]


EXPRESSIONS = [
    *("raise_exception('no')", "messages[9].x.y", "messages[0].content + 1", "''.join(1)"),
    *("1 / 0", "range(10 ** 9) | list", "'%c' % -1", "messages[0].content.foo()", "'{}'.format()"),
    *("{}.pop('k')", "[].pop()", "'%d' % 'a'", "undefined()", "1 | items | list"),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_whatever_a_template_raises_stays_in_its_row(expression):
    check = f"{{% if messages[0].content == 'bad' %}}{{{{ {expression} }}}}{{% endif %}}"
    tokenizer = make_tokenizer(PLAIN + check)
    result = render(tokenizer, chat("bad", "a b"))
    assert result.documents == []
    assert result.rejected[0].reason.startswith("template: ")
    assert len(render(tokenizer, chat("good", "a b")).documents) == 1


def test_a_call_too_deep_for_the_template_costs_its_row_alone():
    tokenizer = make_tokenizer(PLAIN + "{{ messages[0].extra | tojson }}")
    deep: list = []
    for _ in range(3000):
        deep = [deep]
    messages = chat("q", "a b")
    messages[0]["extra"] = deep
    assert render(tokenizer, messages).rejected[0].reason.startswith("template: ")


def test_an_end_of_turn_that_is_not_in_the_render_is_refused(tokenizers):
    """Wrong eos ids must not silently leave the end of turn untrained."""
    result = render(tokenizers["plain"], chat("q", "a b"), eos_ids=frozenset({END_OF_TEXT}))
    assert result.documents == []
    assert "no end-of-turn token" in result.rejected[0].reason


def test_roles_that_the_template_leaves_out(tokenizers):
    tool = [
        *chat("q", "call it"),
        {"role": "tool", "content": "r"},
        *chat("a b", start="assistant"),
    ]
    developer = [{"role": "developer", "content": "d"}, *chat("q", "a b")]
    assert render(tokenizers["qwen3"], tool).documents
    assert "'developer'" in render(tokenizers["qwen3"], developer).rejected[0].reason
    assert render(tokenizers["plain"], tool).documents  # prints any role
    assert render(tokenizers["bos"], tool).rejected[0].reason == "template: Roles must alternate"


def test_tools_reach_the_template_and_arguments_stay_as_they_are(tokenizers):
    tokenizer = tokenizers["qwen3"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]
    answer = {"role": "assistant", "content": "", "tool_calls": [{"arguments": '{"x": "2"}'}]}
    result = render(tokenizer, [*chat("q"), answer], tools, mode=False)
    text = tokenizer.decode(result.documents[0].ids)
    assert '"parameters": {"a": 1}' in text
    assert '<tool_call>\n{"x": "2"}\n' in text
    assert supervised(result.documents) == served(tokenizer, [*chat("q"), answer], False, tools)


def test_a_renderer_refuses_what_it_cannot_work_with():
    tokenizer = make_tokenizer(PLAIN)
    with pytest.raises(ValueError, match="eos_ids"):
        make_renderer(tokenizer, eos_ids={10_000})
    with pytest.raises(ValueError, match="eos_ids"):
        make_renderer(tokenizer, eos_ids=())
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        make_renderer(tokenizer)


def test_identity_is_stable_and_covers_what_matters():
    def identity(template=PLAIN, change=None, **options):
        tokenizer = make_tokenizer(template)
        if change is not None:
            change(tokenizer)
        return make_renderer(tokenizer, **options).identity()

    base = identity()
    assert identity() == base
    tokenizer = make_tokenizer(PLAIN)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)  # leaves its mark inside
    assert make_renderer(pickle.loads(pickle.dumps(tokenizer))).identity() == base
    others = [
        identity(PLAIN + " "),
        identity(mode=True),
        identity(mode=False),
        identity(max_length=64),
        identity(eos_ids={IM_END}),
        identity(change=lambda tokenizer: tokenizer.add_tokens(["neu"])),
        identity(change=lambda tokenizer: setattr(tokenizer, "bos_token", "<|im_start|>")),
    ]
    assert len({base, *others}) == 1 + len(others)
