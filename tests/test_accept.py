"""The walk against speculative decoding acted out token by token."""

import numpy as np
import pytest
from drafters import tiny_batch

from dflash_ddp.accept import AcceptTally, Span, answer_spans, walk
from dflash_ddp.batch import PackedBatch


def decode(answer: list[int], drafts_at: dict[int, list[int]]) -> list[int]:
    """Greedy speculative decoding of a known answer; tokens yielded by each target call."""
    produced, yielded = 1, []  # the prefill gives the first token
    while produced < len(answer):
        drafts = drafts_at[produced - 1]
        call = 0
        for draft in drafts:
            if produced + call < len(answer) and draft == answer[produced + call]:
                call += 1
            else:
                break
        call = min(call + 1, len(answer) - produced)  # the target's own token, unless ended
        yielded.append(call)
        produced += call
    return yielded


@pytest.mark.parametrize("seed", range(50))
def test_walk_equals_decoding(seed):
    generator = np.random.default_rng(seed)
    length, drafted = int(generator.integers(2, 40)), int(generator.integers(1, 8))
    answer = generator.integers(0, 3, length).tolist()
    padded = answer + [-1] * drafted
    drafts = {a: generator.integers(0, 3, drafted).tolist() for a in range(length - 1)}
    right = np.array(
        [[drafts[a][k] == padded[a + 1 + k] for k in range(drafted)] for a in range(length - 1)]
    )
    assert walk(Span(0, 7, 7 + length), right) == decode(answer, drafts)


def test_perfect_and_useless_drafts():
    assert walk(Span(0, 0, 13), np.ones((12, 3), bool)) == [4, 4, 4]
    assert walk(Span(0, 0, 4), np.zeros((3, 3), bool)) == [1, 1, 1]


def test_spans_are_answers_within_documents():
    batch = tiny_batch((6, 5), prompt=3)
    assert answer_spans(batch) == [Span(0, 3, 6), Span(1, 9, 11)]
    turns = PackedBatch(
        0,
        *(getattr(batch, f) for f in ("input_ids", "positions")),
        np.array([0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1], bool),
        batch.document_lengths,
        batch.document_ids,
    )
    assert answer_spans(turns) == [Span(0, 1, 3), Span(0, 4, 6), Span(1, 6, 8), Span(1, 10, 11)]


def test_tally_is_a_mean_over_documents_and_adds_over_ranks():
    first, second = AcceptTally.empty(4), AcceptTally.empty(4)
    first.add([4, 2])
    first.add([])
    second.add([1])
    total = AcceptTally.from_array(first.to_array() + second.to_array())
    assert total.documents == 2
    assert total.accept_length == 2.0
    assert total.standard_error == pytest.approx(1.0)
    assert total.slot_acceptance() == [pytest.approx(2 / 3), 0.5, 1.0]
    assert AcceptTally.empty(4).accept_length is None


def test_the_chart_has_a_bar_a_slot_as_long_as_the_share_of_calls():
    """Bars and one, the target's own token, add up to the mean of all calls."""
    tally = AcceptTally.empty(4)
    tally.add([4, 2, 1, 1])
    title, *bars = tally.chart().splitlines()
    assert "4 target calls" in title
    assert [bar.count("█") for bar in bars] == [30, 15, 15]
    assert [bar.split()[2] for bar in bars] == ["50%", "25%", "25%"]
    assert 1 + sum(bar.count("█") for bar in bars) / 60 == (4 + 2 + 1 + 1) / 4
    assert AcceptTally.empty(4).chart().count("0%") == 3


def test_a_walk_over_text_that_the_target_did_not_write_has_another_name():
    tally = AcceptTally.empty(4)
    tally.add([4, 2, 1, 1])
    tally.add([2, 2])
    own, text = tally.metrics(generated=True), tally.metrics(generated=False)
    assert own["heldout/accept_length"] == text["heldout/walk_on_text"] == 2.0
    assert "heldout/walk_on_text" not in own
    assert "heldout/accept_length" not in text
    lengths = [own[f"heldout/length_{k}"] for k in (1, 2, 3, 4)]
    assert lengths == pytest.approx([2 / 6, 3 / 6, 0, 1 / 6])
    assert own["heldout/documents"] == 2
    assert set(AcceptTally.empty(4).metrics(generated=True).values()) == {None, 0}
