"""What a drafter rank takes in: its packed batches in order, and the features that belong to each."""

from typing import Protocol

from torch import Tensor

from dflash_ddp.batch import PackedBatch
from dflash_ddp.channel import Received
from dflash_ddp.drafter.blocks import decay_gamma, make_blocks, sample_anchors
from dflash_ddp.drafter.inputs import HostInputs, host_inputs
from dflash_ddp.schedule import Kind
from dflash_ddp.startup import Run


class Features(Protocol):
    """Where a drafter's feature batches come from: the channel, or the rank itself."""

    num_full: int

    @property
    def wait_s(self) -> float:
        """Seconds that the rank has stood idle for want of features."""

    def receive(self) -> Received | None:
        """The next feature batch of this drafter; None after its last."""

    def release(self, received: Received) -> None:
        """Give its slot back."""

    def close(self) -> None:
        """Wait until nothing more can come."""


class Intake:
    """The items of one drafter rank, one after the other."""

    def __init__(self, run: Run, features: Features, ordinal: int) -> None:
        """Stand before the first item of drafter `ordinal`."""
        self.features = features
        self._run, self._ordinal, self._sequence = run, ordinal, 0

    def next(self, expected: Kind) -> tuple[int, PackedBatch]:
        """The next item and its packed batch; its features may still be on their way."""
        item = self._run.schedule.item_of(self._ordinal, self._sequence)
        assert item is not None, "the stream has no more items for this drafter"
        self._sequence += 1
        stream_item = self._run.schedule.item(item)
        assert stream_item.kind is expected
        return item, self._run.load(stream_item)

    def receive(self, item: int, batch: PackedBatch) -> Received:
        """The features of `batch`, proven to belong to it.

        Raises:
            ValueError: another item or other tokens than this rank's schedule says.
        """
        received = self.features.receive()
        if received is None:
            raise ValueError(f"the stream ended before item {item}")
        header = received.header
        if received.item != item or header.digest != batch.digest():
            raise ValueError(
                f"features of item {received.item} (digest {header.digest:08x}) came where item "
                f"{item} (digest {batch.digest():08x}) was due: do all nodes hold the same data?"
            )
        return received

    def tensor(self, received: Received) -> Tensor:
        """Its context features [S, C] in the drafter's compute dtype, zero behind its tokens."""
        features_SC = self._run.slot_features(received.slot)
        # Nobody attends to what an earlier batch left there, but zero times NaN is NaN.
        features_SC[received.header.num_tokens :].zero_()
        return features_SC.to(self._run.drafter_dtype)

    def host_inputs(self, batch: PackedBatch, chunk_rows: int) -> HostInputs:
        """What a training step takes of a batch: blocks at its anchors, in loss chunks of `chunk_rows`."""
        config = self._run.config
        blocks = make_blocks(
            batch,
            sample_anchors(batch, config.drafter.num_anchors, seed=config.seed),
            num_anchors=config.drafter.num_anchors,
            block_size=config.drafter.block_size,
            gamma=decay_gamma(config.loss, config.drafter.block_size),
        )
        return host_inputs(
            batch,
            blocks,
            self._run.shape,
            context_length=config.tokens_per_batch,
            chunk_rows=chunk_rows,
            flex=self._run.device == "cuda",
        )
