"""Real decoding: lossless, equal to the walk, exact in its probabilities, on a hybrid target too."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters import tiny_drafter, tiny_shape
from served import load_target, own_answer, packed, teach
from targets import SPECIAL_TOKENS, TABLE_ROWS, build_target
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_ddp.config import DrafterConfig
from dflash_ddp.decode import DrafterReader, Sampler, TargetReader, decode
from dflash_ddp.drafter.step import Tables
from dflash_ddp.evaluate import Pair, walked
from dflash_ddp.native import load_capture_layers, load_native

MASK_TOKEN = TABLE_ROWS - 1
assert len(SPECIAL_TOKENS) + 256 < MASK_TOKEN


class Scripted:
    """Drafts that know the answer and are wrong at random places."""

    def __init__(self, answer, prompt_length, block_size, seed):
        self.answer, self.prompt_length, self.block_size = answer, prompt_length, block_size
        self.random = np.random.default_rng(seed)

    def start(self):
        self.read_so_far = 0

    def read(self, features_LC):
        self.read_so_far += len(features_LC)

    def draft(self, anchor):
        place = self.read_so_far - self.prompt_length
        assert self.answer[place] == anchor, "features end right before the newest token"
        logits = torch.zeros(self.block_size - 1, TABLE_ROWS)
        for slot in range(self.block_size - 1):
            right = self.answer[place + 1 + slot] if place + 1 + slot < len(self.answer) else 0
            wrong = self.random.random() < 0.25
            logits[slot, (right + wrong) % TABLE_ROWS] = 1.0
        return logits


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    made = {}

    def make(kind) -> TargetReader:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            if kind == "sliding":
                build_sliding(folder)
            else:
                build_target(kind, folder)
            made[kind] = TargetReader(load_target(folder), [1, 3])
        return made[kind]

    return make


def build_sliding(folder):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=TABLE_ROWS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


PROMPT = np.random.default_rng(0).integers(0, 256, 23).tolist()


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_5", "llama", "sliding"])
@pytest.mark.parametrize("block_size", [2, 7])
def test_output_is_the_targets_own_whatever_the_drafts(reader, kind, block_size):
    """Every number of accepted drafts occurs; the answer is that of transformers' generate."""
    target = reader(kind)
    plain = own_answer(target, PROMPT, 48)
    generated = target.model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=48, eos_token_id=None
    )
    assert plain == generated[0, len(PROMPT) :].tolist()
    drafts = Scripted(plain + [0] * 16, len(PROMPT), block_size, seed=block_size)
    fast = decode(target, drafts, PROMPT, max_new_tokens=48)
    assert fast.tokens == plain
    assert sum(fast.calls) == 47
    assert len(set(fast.calls)) >= min(block_size, 4)


def test_a_recurrent_state_that_is_not_put_back_is_noticed(reader, monkeypatch):
    """The test above sees the fault that it is there for."""
    target = reader("qwen3_5")
    plain = own_answer(target, PROMPT, 48)
    drafts = Scripted(plain + [0] * 16, len(PROMPT), 5, seed=5)
    monkeypatch.setattr("dflash_ddp.decode._copies", lambda states: {})
    with pytest.raises(AssertionError, match="newest token"):
        assert decode(target, drafts, PROMPT, max_new_tokens=48).tokens == plain, "newest token"


def test_features_equal_one_reading_of_the_whole(reader):
    """Read in pieces, with some of each piece forgotten, the features are those of the text."""
    for kind in ("qwen3_tied", "qwen3_5", "sliding"):
        target, text = reader(kind), PROMPT * 2
        target.start()
        whole = target.read(text)
        target.start()
        place, pieces = 0, []
        for length, kept in ((11, 11), (8, 3), (8, 8), (1, 1), (8, 1), (22, 22)):
            piece = (text[place : place + kept] + [7] * length)[:length]
            pieces.append(target.read(piece).features_LC[:kept])
            target.keep(kept)
            place += kept
        assert place == len(text)
        assert torch.cat(pieces).shape == whole.features_LC.shape
        assert (torch.cat(pieces) - whole.features_LC).abs().max() < 2e-3 * (
            whole.features_LC.abs().max()
        )


def test_stop_tokens_and_limits_cut_the_last_call(reader):
    target = reader("qwen3_tied")
    plain = own_answer(target, PROMPT, 48)
    for limit in (1, 2, 7):
        drafts = Scripted(plain + [0] * 16, len(PROMPT), 8, seed=1)
        fast = decode(target, drafts, PROMPT, max_new_tokens=limit)
        assert fast.tokens == plain[:limit]
        assert sum(fast.calls) == limit - 1
    stop = next(i for i in range(5, 48) if plain[i] not in plain[:i])
    drafts = Scripted(plain + [0] * 16, len(PROMPT), 8, seed=1)
    fast = decode(target, drafts, PROMPT, max_new_tokens=48, stop_ids={plain[stop]})
    assert fast.tokens == plain[: stop + 1]


@pytest.mark.parametrize(("kind", "sliding"), [("qwen3_tied", 1), ("qwen3_5", 0)])
def test_walk_equals_decoding_with_a_trained_drafter(reader, kind, sliding, tmp_path):
    target = reader(kind)
    generator = np.random.default_rng(3)
    documents = []
    for _ in range(4):
        prompt = generator.integers(0, 256, int(generator.integers(5, 20))).tolist()
        documents.append((prompt, own_answer(target, prompt, 40)))
    config = DrafterConfig(num_layers=2, block_size=6, sliding_layers=sliding, sliding_window=12)
    folder = teach(
        Path(target.model.name_or_path),
        documents[:3],
        tmp_path,
        config=config,
        mask_token_id=MASK_TOKEN,
        steps=40,
    )
    pair, longest = pair_of(target.model, folder), 0
    for prompt, answer in documents:
        calls, generated = walked(pair, packed([(prompt, answer)]))
        fast = decode(pair.target, pair.drafter, prompt, max_new_tokens=len(answer))
        assert fast.tokens == answer
        assert generated
        assert fast.calls == calls
        longest = max(longest, *calls)
    assert longest >= 3
    changed = [*answer[:20], (answer[20] + 1) % 200, *answer[21:]]
    assert not walked(pair, packed([(prompt, changed)]))[1], "the target would not have said so"


def pair_of(model, folder) -> Pair:
    tables = Tables(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    drafter = DrafterReader(load_native(folder, torch.device("cpu")), tables)
    return Pair(TargetReader(model, load_capture_layers(folder)), drafter, set(), folder)


# Temperature above 0.


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Probability of counts at least so far from the expected ones; rare cells are joined."""
    order = np.argsort(expected)
    rare = order[np.cumsum(expected[order]) < 5]
    keep = np.setdiff1d(np.arange(len(expected)), rare)
    seen = np.append(observed[keep], observed[rare].sum())
    wanted = np.append(expected[keep], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_the_chi_square_test_itself():
    """5 % quantiles of 1 and 10 degrees of freedom, from tables."""
    expected = np.array([50.0, 50.0])
    shift = np.sqrt(3.841 * 25)
    assert chi_square_p(expected + np.array([shift, -shift]), expected) == pytest.approx(
        0.05, abs=1e-3
    )
    expected = np.full(11, 100.0)
    observed = expected + np.array([1, -1] * 5 + [0]) * np.sqrt(18.307 * 10)
    assert chi_square_p(observed, expected) == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize("seed", range(2))
def test_judged_tokens_have_the_targets_distribution(seed):
    """Two slots over five tokens, the drafter far from the target: all outcomes, 4,000 draws."""
    torch.manual_seed(seed)
    q_logits, p_logits = 2 * torch.randn(2, 5), 2 * torch.randn(5, 3, 5)
    sampler = Sampler(0.7, torch.Generator().manual_seed(seed))
    p = (p_logits / 0.7).softmax(-1).double().numpy()
    expected, observed = np.zeros((5, 5)), np.zeros((5, 5))
    for first, second in itertools.product(range(5), range(5)):
        expected[first, second] = p[0, 0, first] * p[first, 1, second]
    for _ in range(4_000):
        drafts, drawn_from = sampler.propose(q_logits)
        logits = torch.stack([p_logits[0, 0], p_logits[drafts[0], 1], p_logits[drafts[1], 2]])
        new = sampler.judge(drafts, drawn_from, logits)
        if len(new) == 1:  # the next call would draw the second token from p alone
            new.append(int(sampler.propose(p_logits[new[0], 1][None])[0]))
        observed[new[0], new[1]] += 1
    assert chi_square_p(observed.ravel(), 4_000 * expected.ravel()) > 1e-3


def test_decoded_tokens_have_the_targets_distribution():
    """The whole loop on a target of 4 tokens: three new tokens, 64 outcomes, against its own p."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).eval()
    shape = tiny_shape(block_size=3)
    target = TargetReader(model, [0, 1, 2])
    tables = Tables(model.get_input_embeddings().weight, model.lm_head.weight)
    drafter = DrafterReader(tiny_drafter(dataclasses.replace(shape, mask_token_id=3)), tables)
    prompt, draws = [1, 0, 2], 300
    observed, expected = np.zeros((4, 4, 4)), np.zeros((4, 4, 4))
    sampler = Sampler(1.0, torch.Generator().manual_seed(0))
    for _ in range(draws):
        tokens = decode(target, drafter, prompt, max_new_tokens=3, sampler=sampler).tokens
        observed[tuple(tokens)] += 1
    pairs = torch.tensor([[*prompt, *pair] for pair in itertools.product(range(4), range(4))])
    with torch.no_grad():
        p = model(pairs).logits.softmax(-1)[:, 2:].double().numpy().reshape(4, 4, 3, 4)
    for a, b, c in itertools.product(range(4), range(4), range(4)):
        expected[a, b, c] = p[a, b, 0, a] * p[a, b, 1, b] * p[a, b, 2, c]
    assert expected.sum() == pytest.approx(1)
    assert chi_square_p(observed.ravel(), draws * expected.ravel()) > 1e-3
