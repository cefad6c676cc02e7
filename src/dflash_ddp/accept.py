"""Exact greedy accept length, without decoding.

Where the target generated a document's answer greedily, speculative decoding at temperature 0 would produce the same
tokens, and each of its draft blocks depends only on where it opens. So one target pass gives all features, one
drafter pass with an anchor at every place gives all drafts, and the walk below reads off what decoding would do:

    open at a, accept the n leading drafts that equal the answer, take the target's own next token: go to a + n + 1

A call of the target yields n + 1 tokens, cut at the answer's end. Accept length is the mean over the calls of a
document, then the mean over documents (z-lab's definition; the bonus token counts, the prefill's token does not).
"""

from dataclasses import dataclass

import numpy as np

from dflash_ddp.batch import PackedBatch

CHART_WIDTH = 60  # characters of a bar that is always accepted


@dataclass(frozen=True, slots=True)
class Span:
    """One answer: generated tokens at places first..end-1 of the packed batch, all in one document."""

    document: int
    first: int
    end: int


def answer_spans(batch: PackedBatch) -> list[Span]:
    """Runs of generated tokens, split at document borders, in order."""
    mask = np.concatenate([[False], batch.loss_mask, [False]])
    border = np.concatenate([batch.positions == 0, [True]])
    begins = np.flatnonzero(mask[1:-1] & (~mask[:-2] | border[:-1]))
    ends = np.flatnonzero(mask[1:-1] & (~mask[2:] | border[1:])) + 1
    documents = np.repeat(np.arange(len(batch.document_lengths)), batch.document_lengths)
    return [Span(int(documents[a]), int(a), int(b)) for a, b in zip(begins, ends, strict=True)]


def walk(span: Span, right_AB: np.ndarray) -> list[int]:
    """Tokens that each target call yields over one answer.

    Args:
        span: the answer; its first token came from the prefill.
        right_AB: bool [anchors, B-1], whether draft k of the anchor at `span.first + i` is right.
    """
    runs_A = np.logical_and.accumulate(right_AB, axis=1).sum(axis=1)
    place, yielded = span.first, []
    while place < span.end - 1:
        run = int(runs_A[place - span.first])
        produced = min(run + 1, span.end - 1 - place)
        yielded.append(produced)
        place += produced
    return yielded


@dataclass(slots=True)
class AcceptTally:
    """Adds up over documents and ranks.

    Attributes:
        documents: documents with at least one target call.
        total: sum over documents of their mean accept length.
        squares: sum of its square.
        histogram: target calls by tokens yielded, index 1..B.
    """

    documents: int
    total: float
    squares: float
    histogram: np.ndarray

    @classmethod
    def empty(cls, block_size: int) -> "AcceptTally":
        """Nothing yet."""
        return cls(0, 0.0, 0.0, np.zeros(block_size + 1))

    def add(self, calls: list[int]) -> None:
        """One document's target calls; a document without any does not count."""
        if not calls:
            return
        mean = sum(calls) / len(calls)
        self.documents += 1
        self.total += mean
        self.squares += mean * mean
        np.add.at(self.histogram, np.array(calls), 1)

    def to_array(self) -> np.ndarray:
        """fp64 vector to sum over ranks."""
        return np.concatenate([[self.documents, self.total, self.squares], self.histogram])

    @classmethod
    def from_array(cls, array: np.ndarray) -> "AcceptTally":
        """The inverse of `to_array`."""
        return cls(round(array[0]), float(array[1]), float(array[2]), array[3:])

    @property
    def accept_length(self) -> float | None:
        """Mean tokens of a target call, 1..B; None without documents."""
        return self.total / self.documents if self.documents else None

    @property
    def standard_error(self) -> float | None:
        """Of the mean over documents; None below two documents."""
        if self.documents < 2:
            return None
        mean = self.total / self.documents
        variance = max(self.squares / self.documents - mean * mean, 0.0)
        return float(np.sqrt(variance / (self.documents - 1)))

    def metrics(self, *, generated: bool) -> dict[str, float | None]:
        """What an evaluation logs; `length_k`: share of target calls that yielded k tokens.

        Args:
            generated: the target itself wrote the answers, greedily. Only then is the walk the
                accept length of decoding; over other text the same figure has another name.
        """
        name = "accept_length" if generated else "walk_on_text"
        calls = self.histogram.sum()
        shares = self.histogram / calls if calls else [None] * len(self.histogram)
        return (
            {
                f"heldout/{name}": self.accept_length,
                "heldout/standard_error": self.standard_error,
                "heldout/documents": self.documents,
            }
            | {f"heldout/slot_{k}": share for k, share in enumerate(self.slot_acceptance(), 1)}
            | {f"heldout/length_{k}": share for k, share in enumerate(shares) if k}
        )

    def chart(self) -> str:
        """For people: a bar a slot, the share of target calls in which its draft was accepted."""
        calls = self.histogram.sum()
        accepted = self.histogram[::-1].cumsum()[::-1][2:] / max(calls, 1)
        bars = [
            f"  slot {k:>2}  {share:4.0%}  {'█' * round(CHART_WIDTH * share)}".rstrip()
            for k, share in enumerate(accepted, 1)
        ]
        title = f"drafts accepted, of {int(calls):,} target calls on held-out text"
        return "\n".join([title, *bars])

    def slot_acceptance(self) -> list[float | None]:
        """For slots 1..B-1: how often the slot is accepted, given that the one before was."""
        reached = self.histogram[::-1].cumsum()[::-1]  # reached[i]: calls that yielded >= i tokens
        return [
            float(reached[i + 1] / reached[i]) if reached[i] else None
            for i in range(1, len(reached) - 1)
        ]
