"""A rank with both roles: it computes the features of its own items, without transport.

Takes the place of the channel's receiver, so the drafter's program is the same; the items and their order are those
of a disaggregated run, and so are the losses.
"""

import torch

from dflash_ddp.channel import Received
from dflash_ddp.control import Header
from dflash_ddp.startup import Run
from dflash_ddp.target.worker import FeatureSource


class LocalFeatures:
    """Features of one drafter's items, computed when asked for."""

    def __init__(self, run: Run, device: torch.device, drafter: int) -> None:
        """Load the target and allocate one slot."""
        self.wait_s = 0.0
        """A colocated rank never waits for features: it makes them."""
        self.num_full = 0
        self._run, self._drafter, self._sequence = run, drafter, 0
        self._source = FeatureSource(run, device)
        self._slot = torch.zeros(run.slot_bytes, dtype=torch.uint8, device=device)

    def receive(self) -> Received | None:
        """Compute the next item of this drafter; None after its last."""
        run, sequence = self._run, self._sequence
        item = run.schedule.item_of(self._drafter, sequence)
        if item is None:
            return None
        batch = run.load(run.schedule.item(item))
        self._source.features(batch, run.slot_features(self._slot))
        self._sequence += 1
        header = Header(
            item=item,
            target_rank=0,
            num_tokens=batch.num_tokens,
            num_bytes=run.feature_bytes(batch.num_tokens),
            dtype=str(run.feature_dtype),
            digest=batch.digest(),
        )
        return Received(sequence, self._slot, header)

    def release(self, received: Received) -> None:
        """Nothing to do: the next forward is queued behind the reading of the slot."""

    def close(self) -> None:
        """Nothing to wait for."""
