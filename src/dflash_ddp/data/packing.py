"""Documents to packed batches: an endless sequence that is a pure function of its arguments.

In: the lengths of all documents. Out: for each batch number k the documents of batch k. An epoch is
a permutation of the documents, cut into windows; inside a window they are packed, longest first,
each into the fullest batch that still has room. Batches of like cost are then put side by side:

    | head | group | group | ... | group | tail |     group = batches_per_step batches of like cost
           ^ a step starts here                       head ends the step that the last epoch began

so that the drafter ranks of one step, and the target ranks behind them, wait little for each other.
Groups come in random order. Epochs follow each other without a gap: nothing is dropped or repeated.

Invariants: each document is in exactly one batch of an epoch, whole; a batch has at most
`tokens_per_batch` tokens; `documents(k)` depends on nothing but the arguments and k, so every rank
works it out alone and a resumed run needs only a number.
"""

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

import numpy as np

from dflash_ddp.batch import PackedBatch

if TYPE_CHECKING:
    from dflash_ddp.data.store import DocumentStore

LINEAR_COST = 32768
"""Length at which a document's attention costs the target as much as all the rest of it.

A document of n tokens is taken to cost n * LINEAR_COST + n * n. Counting operations, the length is
parameters / (full-attention layers * query width): 48k for Qwen3-8B, and more for hybrid targets.
Attention runs below the speed of plain matrix products, so this is somewhat lower."""

_WINDOW_BATCHES = 64  # packed together; of these a part of one stays unfilled
_KEPT_EPOCHS = 2  # around the border between two epochs both are asked for


class Packing:
    """The endless sequence of batches over documents of the given lengths.

    Args:
        lengths: int [num_documents], tokens of each document, none empty.
        tokens_per_batch: the token budget S.
        batches_per_step: size of the groups of like cost; step s is batches
            s * batches_per_step and following.
        seed: of the order of documents; not negative.
        shuffle: False packs in document order, each epoch alike, without groups (held-out data).

    Raises:
        ValueError: no documents, or one longer than the budget.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        tokens_per_batch: int,
        batches_per_step: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self._lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        if len(self._lengths) == 0:
            raise ValueError("there are no documents to pack")
        longest = int(self._lengths.argmax())
        if self._lengths[longest] > tokens_per_batch:
            raise ValueError(
                f"document {longest} has {self._lengths[longest]} tokens, more than "
                f"tokens_per_batch={tokens_per_batch}; raise it or lower max_length"
            )
        self._tokens_per_batch = tokens_per_batch
        self._batches_per_step = batches_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._first_batches = [0]  # of each epoch so far known, and of the one behind them
        self._epochs: dict[int, list[np.ndarray]] = {}

    def documents(self, batch: int) -> np.ndarray:
        """int64 [d], the documents of batch `batch`, counted from 0 over all epochs."""
        epoch = self.epoch(batch)
        return self._batches(epoch)[batch - self._first_batches[epoch]]

    def epoch(self, batch: int) -> int:
        """The epoch that batch `batch` belongs to."""
        while self._first_batches[-1] <= batch:
            self._batches(len(self._first_batches) - 1)
        return bisect_right(self._first_batches, batch) - 1

    def num_batches_per_epoch(self, epoch: int) -> int:
        """Batches of this epoch; with shuffling it may differ a little from epoch to epoch."""
        return len(self._batches(epoch))

    def _batches(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch in their final order; kept for the last epochs asked for."""
        if epoch not in self._epochs:
            # Where its steps begin depends on the number of batches before: these come first.
            for earlier in range(len(self._first_batches) - 1, epoch):
                self._batches(earlier)
            batches = self._packed(epoch)
            if len(self._first_batches) == epoch + 1:
                self._first_batches.append(self._first_batches[epoch] + len(batches))
            self._epochs[epoch] = batches
            while len(self._epochs) > _KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
        return self._epochs[epoch]

    def _packed(self, epoch: int) -> list[np.ndarray]:
        if not self._shuffle:
            return _pack_in_order(self._lengths, self._tokens_per_batch)
        # Raw words of the generator: unlike `permutation`, no release of numpy may change them.
        random = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        order = np.argsort(random.random_raw(len(self._lengths)), kind="stable")
        batches = _pack_best_fit(order, self._lengths, self._tokens_per_batch)
        costs = self._lengths * (LINEAR_COST + self._lengths)
        by_cost = np.argsort([costs[batch].sum() for batch in batches], kind="stable")
        head = -self._first_batches[epoch] % self._batches_per_step
        order = _order_groups(by_cost, self._batches_per_step, head=head, random=random)
        return [batches[number] for number in order]


def packed_batch(store: "DocumentStore", document_ids: np.ndarray, index: int) -> PackedBatch:
    """The documents of a batch end to end, read from the store, as batch number `index`."""
    documents = [store.document(int(document)) for document in document_ids]
    lengths = store.lengths[document_ids]
    return PackedBatch(
        index=index,
        input_ids=np.concatenate([ids for ids, _ in documents]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        loss_mask=np.concatenate([loss_mask for _, loss_mask in documents]),
        document_lengths=lengths,
        document_ids=np.asarray(document_ids, dtype=np.int64),
    )


def _pack_in_order(lengths: np.ndarray, tokens_per_batch: int) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    starts = [0]
    while starts[-1] < len(lengths):
        before = ends[starts[-1] - 1] if starts[-1] else 0
        starts.append(int(np.searchsorted(ends, before + tokens_per_batch, side="right")))
    return np.split(np.arange(len(lengths)), starts[1:-1])


def _pack_best_fit(
    order: np.ndarray, lengths: np.ndarray, tokens_per_batch: int
) -> list[np.ndarray]:
    """Pack windows of consecutive documents of `order`, each by best fit with the longest first."""
    # A little less than whole batches, or many windows would need one more for a few documents.
    window_tokens = _WINDOW_BATCHES * tokens_per_batch - tokens_per_batch // 4
    windows = (np.cumsum(lengths[order]) - 1) // window_tokens
    # By window, then by falling length; the sort is stable, so ties keep the random order.
    order = order[np.lexsort((-lengths[order], windows))]
    batches = []
    for window in np.split(order, np.flatnonzero(np.diff(windows)) + 1):
        bins = np.array(_best_fit(lengths[window].tolist(), tokens_per_batch))
        by_bin = window[np.argsort(bins, kind="stable")]
        batches += np.split(by_bin, np.cumsum(np.bincount(bins))[:-1])
    return batches


def _best_fit(lengths: list[int], tokens_per_batch: int) -> list[int]:
    """The bin of each document: the fullest that still has room, else a new one."""
    rooms: list[tuple[int, int]] = []  # room and number of each bin, least room first
    bins = []
    num_bins = 0
    for length in lengths:
        at = bisect_left(rooms, (length, 0))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = tokens_per_batch, num_bins
            num_bins += 1
        bins.append(number)
        insort(rooms, (room - length, number))
    return bins


def _order_groups(
    by_cost: np.ndarray, batches_per_step: int, *, head: int, random: np.random.PCG64
) -> np.ndarray:
    """Batches in final order: head, whole groups at random, tail; each group in random order.

    Head and tail are taken from the middle of the costs, so that the step they share across the
    border of two epochs is of like cost too.
    """
    head = min(head, len(by_cost))
    num_loose = head + (len(by_cost) - head) % batches_per_step
    middle = (len(by_cost) - num_loose) // 2 // batches_per_step * batches_per_step
    loose = by_cost[middle : middle + num_loose]
    groups = np.delete(by_cost, np.s_[middle : middle + num_loose]).reshape(-1, batches_per_step)
    groups = groups[np.argsort(random.random_raw(len(groups)), kind="stable")]
    inside = random.random_raw(groups.size).reshape(groups.shape)
    groups = np.take_along_axis(groups, np.argsort(inside, axis=1, kind="stable"), axis=1)
    return np.concatenate([loose[:head], groups.ravel(), loose[head:]])
