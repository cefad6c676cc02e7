"""One transfer over one lane, and the buffers for it: where NCCL and gloo differ.

In: a flat uint8 buffer and a lane. Out: a transfer that can be asked whether it has finished.
Invariant: a buffer lives for the whole run, so no transfer outlives its memory; and whoever posts
one knows that the other side is ready (see channel.py), so it lasts as long as its bytes need.

NCCL: on a side stream, so that nothing waits for compute; completion is polled. Gloo: `wait` in the
thread that posted, never with a time limit (one that expires closes the lane), and no polling
(`is_completed` never turns true).
"""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

from dflash_ddp.control import connection_lost
from dflash_ddp.world import World


class Transfer(NamedTuple):
    """A send or receive that was posted."""

    lane: tuple[int, int]
    work: dist.Work


class Mover:
    """Posts transfers for one thread, the one that makes this object."""

    def __init__(self, world: World) -> None:
        """Bind the thread to the rank's GPU (new threads start on device 0)."""
        self._world = world
        self._side_stream: AbstractContextManager = nullcontext()
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
            self._side_stream = torch.cuda.stream(torch.cuda.Stream(world.device, priority=-1))

    def post(self, buffer: torch.Tensor, lane: tuple[int, int]) -> Transfer:
        """Start to send (on the target rank) or receive (on the drafter rank) the whole buffer.

        Raises:
            RuntimeError: the peer is gone; the text names it.
        """
        (target, drafter), group = lane, self._world.lanes[lane]
        try:
            with self._side_stream:
                # Who meets: the two ranks of the lane. The target has written a header and sends;
                # the drafter has read it and receives. If the peer dies, gloo raises at once; on
                # NCCL the heartbeats end the job, or LANE_LIMIT does.
                if self._world.rank == target:
                    work = dist.isend(buffer, drafter, group=group)
                else:
                    work = dist.irecv(buffer, target, group=group)
        except RuntimeError as error:
            raise self._broken(lane, error) from error
        assert work is not None
        return Transfer(lane, work)

    def finished(self, transfer: Transfer) -> bool:
        """Tell whether all bytes have been sent or received. On gloo: wait for it.

        Raises:
            RuntimeError: the peer is gone, or the transfer failed; the text names the peer.
        """
        try:
            if self._world.device.type == "cuda" and not transfer.work.is_completed():
                return False
            with self._side_stream:
                transfer.work.wait()  # on NCCL it is completed: this only raises what went wrong
        except RuntimeError as error:
            raise self._broken(transfer.lane, error) from error
        return True

    def _broken(self, lane: tuple[int, int], error: RuntimeError) -> RuntimeError:
        peer = lane[0] if self._world.rank == lane[1] else lane[1]
        what = "peer gone" if connection_lost(error) else str(error).partition("\n")[0]
        return RuntimeError(f"lane to {self._world.topology.describe(peer)} broke: {what}")


Mark = torch.cuda.Event | float
"""A point of the current CUDA stream; on a CPU, where calls return when done, of time."""


def mark(world: World) -> Mark:
    """Mark this point."""
    if world.device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds of the device between two marks that it has passed."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return begin.elapsed_time(end) / 1e3


class IdleClock:
    """Seconds that the rank's device stood idle between `begin` and `end`, summed.

    On a GPU the host runs ahead: it may wait for a slot while the GPU has work for seconds. So two
    marks are put into the stream; the second follows the first at once if work was still queued.
    """

    def __init__(self, world: World) -> None:
        """Nothing has been waited for."""
        self._world, self._seconds = world, 0.0
        self._start: Mark = 0.0
        self._flying: deque[tuple[Mark, Mark]] = deque()

    def begin(self) -> None:
        """The wait begins."""
        self._start = mark(self._world)

    def end(self) -> None:
        """The wait is over."""
        self._flying.append((self._start, mark(self._world)))

    def seconds(self) -> float:
        """What is known so far; the GPU is not waited for."""
        while self._flying and passed(self._flying[0][1]):
            self._seconds += seconds_between(*self._flying.popleft())
        return self._seconds


def allocate_slots(world: World, num_slots: int, slot_bytes: int) -> list[torch.Tensor]:
    """Allocate `num_slots` buffers, uint8 [slot_bytes], zeroed, on the rank's device."""
    slots = [
        torch.zeros(slot_bytes, dtype=torch.uint8, device=world.device) for _ in range(num_slots)
    ]
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return slots


def passed(point: Mark) -> bool:
    """Tell whether the device has passed a mark."""
    return isinstance(point, float) or point.query()
