"""The channel: context features from target ranks to drafter ranks, one message a batch.

In, on a target rank: a slot (flat uint8) that its forward fills with row-major features [n, C],
exactly n * C * itemsize bytes. Out, on a drafter rank: the same bytes in a slot of its own, in the
order of its sequence, whichever target computed them.

    target rank                                  drafter rank
    main    acquire: free slot, then ticket
            forward fills the slot, send
    sender  wait until the slot is complete
            wait for credit  <-----------------  fetch  credit: the GPU has read a released slot
            write the header  ---------------->  fetch  read the header, check it
            isend  ===========================>  fetch  irecv into slot (sequence % num_slots)
            complete: the slot is free           main   receive in order of sequence, release

Invariants. A batch leaves only with credit, so its slot at the drafter is free. A receive is posted
after the header, the header is written after the payload is complete, and each target has one send
in flight: so no transfer waits on the GPU for another process, and lanes and DDP cannot block each
other, whatever order the GPU's queues have. Threads call no compiled code. An error in a thread
ends the job through `Control.fail`; a job that ends anywhere ends every wait here, because the
control plane ends the process.
"""

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from dflash_ddp.control import POLL_S, REPORT_EVERY_S, Control, Header
from dflash_ddp.lanes import IdleClock, Mark, Mover, Transfer, allocate_slots, mark, passed
from dflash_ddp.log import exit_on_error
from dflash_ddp.schedule import Schedule
from dflash_ddp.world import World

logger = logging.getLogger(__name__)

_GPU_POLL_S = 0.0005
_DRAINED_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Claim:
    """An item that this target rank computes, and the uint8 slot for its features."""

    item: int
    slot: torch.Tensor


@dataclass(frozen=True, slots=True)
class Received:
    """A batch at its drafter: the first `header.num_bytes` of the uint8 slot. Release it after use.

    Bytes behind them are of earlier batches (zeros at first).
    """

    sequence: int
    slot: torch.Tensor
    header: Header

    @property
    def item(self) -> int:
        """Its place in the stream."""
        return self.header.item


def _end(schedule: Schedule, control: Control) -> int:
    """Where the stream ends: before the stop in force, or after its last item."""
    stop_item = control.stop_item()
    return schedule.num_items if stop_item is None else min(stop_item, schedule.num_items)


class FeatureSender:
    """A target rank's end of the channel: claims items and sends their features."""

    def __init__(
        self,
        world: World,
        control: Control,
        schedule: Schedule,
        *,
        num_slots: int,
        slot_bytes: int,
        dtype: str,
    ) -> None:
        """Allocate the slots and start the sender thread.

        With two slots, the forward fills one while the other is sent. The largest batch must fit
        into `slot_bytes`. `dtype` names the dtype of the features, for the header.
        """
        self._idle = IdleClock(world)
        self._world, self._control, self._schedule, self._dtype = world, control, schedule, dtype
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for slot in allocate_slots(world, num_slots, slot_bytes):
            self._free.put(slot)
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="send", daemon=True)
        self._thread.start()

    def acquire(self) -> Claim | None:
        """Wait for a free slot, then claim the next item of the stream; None when there is none.

        A ticket is taken only with a slot in hand: a claimed item can always be computed, so the
        lowest item that is missing never waits for a full rank.
        """
        self._idle.begin()
        slot = self._free.get()
        self._idle.end()
        item = self._control.claim()
        if self._past_end(item):
            self._free.put(slot)
            return None
        return Claim(item, slot)

    @property
    def wait_slot_s(self) -> float:
        """Seconds that the rank has stood idle because no slot was free."""
        return self._idle.seconds()

    def _past_end(self, item: int) -> bool:
        return item >= _end(self._schedule, self._control)

    def send(self, claim: Claim, *, num_bytes: int, num_tokens: int, digest: int) -> None:
        """Queue the first `num_bytes` of the slot, at once; call it on the stream that fills it."""
        assert 1 <= num_bytes <= len(claim.slot), "the slot must hold the largest packed batch"
        header = Header(
            item=claim.item,
            target_rank=self._world.rank,
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            dtype=self._dtype,
            digest=digest,
        )
        self._outbox.put((claim, header, mark(self._world)))

    def drain(self) -> None:
        """Wait until all that was queued is sent or dropped by a stop; no send may follow."""
        self._outbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Send what is queued, one at a time and in order, until drained."""
        with exit_on_error(self._control.fail):
            mover = Mover(self._world)
            while (entry := self._outbox.get()) is not None:
                claim, header, filled = entry
                while not passed(filled):
                    time.sleep(_GPU_POLL_S)
                self._send_one(mover, claim, header)
                self._free.put(claim.slot)
            self._control.drained()

    def _send_one(self, mover: Mover, claim: Claim, header: Header) -> None:
        """The payload is complete: wait for credit, write the header, transfer."""
        drafter, sequence = self._schedule.route(claim.item)
        while sequence >= self._control.credit(drafter):
            if self._past_end(claim.item):
                return  # the stream stops before this item: nobody wants it
            time.sleep(POLL_S)
        self._control.announce(drafter, header)
        lane = (self._world.rank, self._world.topology.drafter_ranks[drafter])
        transfer = mover.post(claim.slot[: header.num_bytes], lane)
        while not mover.finished(transfer):
            time.sleep(_GPU_POLL_S)


class FeatureReceiver:
    """A drafter rank's end of the channel: hands out the features of its items in order."""

    def __init__(
        self,
        world: World,
        control: Control,
        schedule: Schedule,
        *,
        num_slots: int,
        slot_bytes: int,
        dtype: str,
    ) -> None:
        """Allocate the slots, give credit for all of them, start the fetch thread.

        `num_slots` is depth + 1: one in use, `depth` ahead of it. The largest batch must fit into
        `slot_bytes`. `dtype` names the dtype that headers must carry.
        """
        self._idle = IdleClock(world)
        self.num_full = 0
        """Slots that were full when `receive` was last called."""
        self.drafter = world.topology.drafter_ranks.index(world.rank)
        self._world, self._control, self._schedule, self._dtype = world, control, schedule, dtype
        self._slots = allocate_slots(world, num_slots, slot_bytes)
        self._changed = threading.Condition()
        self._ready: dict[int, Received] = {}
        self._ended = False
        self._next_sequence = self._num_released = 0
        self._num_granted = num_slots
        self._released: deque[Mark] = deque()
        control.grant(self.drafter, num_slots)
        self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
        self._thread.start()

    def receive(self) -> Received | None:
        """Wait for the next item of this drafter; None after its last one, or at the stop.

        The drafter ranks must agree on a stop, and request it, before any of them asks for an item
        at or after it; then all see None at the same step.

        Raises:
            RuntimeError: all targets have ended, but the item was never sent.
        """
        start, sequence = time.monotonic(), self._next_sequence
        item = self._next_item()
        if item is None:
            return None
        self._idle.begin()
        with self._changed:
            self.num_full = len(self._ready)
            while sequence not in self._ready:
                if self._ended:
                    raise RuntimeError(
                        f"all targets have ended, but item {item}, the next of drafter "
                        f"{self.drafter}, was never sent: do all ranks have the same schedule?"
                    )
                if not self._changed.wait(REPORT_EVERY_S):
                    waited, phases = time.monotonic() - start, self._control.phases()
                    logger.warning("waiting %.0f s for item %d (%s)", waited, item, phases)
            received = self._ready.pop(sequence)
        self._next_sequence += 1
        self._idle.end()
        return received

    @property
    def wait_s(self) -> float:
        """Seconds that the rank has stood idle for want of features: the health of the split."""
        return self._idle.seconds()

    def _next_item(self) -> int | None:
        """The item of the next sequence, or None if the stream ends before it."""
        item = self._schedule.item_of(self.drafter, self._next_sequence)
        return None if item is None or item >= _end(self._schedule, self._control) else item

    def release(self, received: Received) -> None:
        """Give a slot back, in the order received; call it on the stream that read it last.

        Credit goes out when the GPU has passed this point. Autograd may hold on to the features:
        release after the backward pass, or after they were copied.
        """
        assert received.sequence == self._num_released, "release in the order received"
        self._num_released += 1
        self._released.append(mark(self._world))

    def close(self) -> None:
        """Wait until all targets have drained; batches that a stop left over are let go.

        Raises:
            RuntimeError: this drafter has items left: targets would wait for credit for ever.
        """
        if (item := self._next_item()) is not None:
            raise RuntimeError(
                f"drafter {self.drafter} closes before item {item}, which is its next"
            )
        self._thread.join()

    def _run(self) -> None:
        """Give credit, post announced receives, hand over complete ones, until all is drained."""
        with exit_on_error(self._control.fail):
            mover, num_targets = Mover(self._world), len(self._world.topology.target_ranks)
            num_headers, drained, next_look = 0, False, 0.0
            flying: dict[int, tuple[Received, Transfer]] = {}
            while True:
                if not drained and time.monotonic() >= next_look:
                    # Before the look for a header: a target announces first and drains then.
                    drained = self._control.num_drained() == num_targets
                    next_look = time.monotonic() + _DRAINED_POLL_S
                granted = self._grant()
                header = self._control.header(self.drafter, num_headers)
                if header is not None:
                    num_headers += 1
                    received, transfer = self._post(mover, header)
                    flying[received.sequence] = received, transfer
                landed = [s for s, (_, transfer) in flying.items() if mover.finished(transfer)]
                arrived = {sequence: flying.pop(sequence)[0] for sequence in landed}
                ended = drained and header is None and not flying
                if arrived or ended:
                    with self._changed:
                        self._ready |= arrived
                        self._ended = ended
                        self._changed.notify_all()
                if ended:
                    return
                if not (granted or header or arrived):
                    time.sleep(POLL_S)

    def _grant(self) -> bool:
        """Give credit for released slots that the GPU has read; tell whether there were any."""
        num_read = 0
        while self._released and passed(self._released[0]):
            self._released.popleft()
            num_read += 1
        if num_read:
            self._num_granted += num_read
            self._control.grant(self.drafter, num_read)
        return num_read > 0

    def _post(self, mover: Mover, header: Header) -> tuple[Received, Transfer]:
        """Check an announced batch and start to receive it into the slot of its sequence."""
        sequence = self._check(header)
        slot = self._slots[sequence % len(self._slots)]
        lane = (header.target_rank, self._world.rank)
        received = Received(sequence, slot, header)
        return received, mover.post(slot[: header.num_bytes], lane)

    def _check(self, header: Header) -> int:
        """Return the sequence of an announced batch.

        Raises:
            ValueError: it is not what this drafter expects; the text names both.
        """
        sender = self._world.topology.describe(header.target_rank)
        said, here = f"{sender} announces item {header.item}", f"drafter {self.drafter}"
        if header.item >= self._schedule.num_items:
            raise ValueError(
                f"{said} to {here}, whose stream has {self._schedule.num_items} items: do all "
                f"ranks have the same schedule?"
            )
        drafter, sequence = self._schedule.route(header.item)
        oldest, end = self._num_granted - len(self._slots), self._num_granted
        if drafter != self.drafter or not oldest <= sequence < end:
            raise ValueError(
                f"{said} to {here}, which has room for sequences {oldest} to {end - 1}; by the "
                f"schedule here it is sequence {sequence} of drafter {drafter}: do all ranks have "
                f"the same schedule?"
            )
        slot_bytes = len(self._slots[0])
        if not 1 <= header.num_bytes <= slot_bytes or header.dtype != self._dtype:
            raise ValueError(
                f"{said} with {header.num_bytes} bytes of {header.dtype}, but {here} expects 1 to "
                f"{slot_bytes} bytes of {self._dtype}"
            )
        return sequence
