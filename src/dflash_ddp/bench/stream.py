"""The stream alone: real ranks, channel and transfers, but compute that only takes its time.

Shows what the channel costs and whether it keeps all ranks busy, apart from the speed of any model: the ideal rate is
min(sum over targets of 1 / target time, drafters / drafter time). `grown_mib` is the memory that transfers after the
warm-up have added to a rank: none, however many there are.
"""

import random
import time
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from dflash_ddp.bench.measure import memory_mib
from dflash_ddp.bench.ranks import join, leave, options_of_rank, report, run_ranks
from dflash_ddp.channel import FeatureReceiver, FeatureSender
from dflash_ddp.control import Control
from dflash_ddp.costs import SENDER_SLOTS
from dflash_ddp.schedule import Schedule
from dflash_ddp.world import World

WARM_UP_ITEMS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """What takes how long. The first `WARM_UP_ITEMS` items of each drafter do not count."""

    targets: int = 2
    """Target ranks."""
    drafters: int = 1
    """Drafter ranks."""
    target_ms: float = 40.0
    """Time of an item on a target; on target 0 `slow_factor` times as long."""
    drafter_ms: float = 20.0
    """Time of an item on a drafter."""
    slow_factor: float = 1.0
    """See `target_ms`."""
    jitter: float = 0.0
    """Each time is longer or shorter by up to this share, at random but keyed by the item; 0..1."""
    mib: float = 1.0
    """Size of an item, all of which the drafter compares."""
    items: int = 200
    """How many, of which each drafter takes the same number; a soak has many."""

    @property
    def slot_bytes(self) -> int:
        """Of an item."""
        return int(self.mib * 2**20)


def bench_stream(options: StreamOptions) -> dict[str, Any]:
    """One row."""
    targets, drafters = options.targets, options.drafters
    rows = run_ranks("dflash_ddp.bench.stream", options, num_ranks=targets + drafters)
    rate = min(row["items_per_s"] for row in rows[targets:]) * drafters
    ideal = ideal_items_per_s(options)
    return {
        "items_per_s": round(rate, 2),
        "ideal_items_per_s": round(ideal, 2),
        "share_of_ideal": round(rate / ideal, 3),
        "items_of_targets": [row["items"] for row in rows[:targets]],
        "grown_mib": round(max(row["grown_mib"] for row in rows), 1),
    }


def ideal_items_per_s(options: StreamOptions) -> float:
    """The rate if no rank ever waited for anything but the slower role."""
    made = 1e3 / options.target_ms * (options.targets - 1 + 1 / options.slow_factor)
    return min(made, 1e3 / options.drafter_ms * options.drafters)


def take_time(milliseconds: float, item: int, jitter: float) -> None:
    """Sleep as long as the item takes."""
    factor = 1 + jitter * random.Random(item).uniform(-1, 1)
    time.sleep(milliseconds * factor / 1e3)


def send_items(world: World, control: Control, schedule: Schedule, options: StreamOptions) -> dict:
    """A target's program."""
    sender = FeatureSender(
        world,
        control,
        schedule,
        num_slots=SENDER_SLOTS,
        slot_bytes=options.slot_bytes,
        dtype="uint8",
    )
    slow = options.slow_factor if world.rank == 0 else 1.0
    count, before = 0, inf
    while (claim := sender.acquire()) is not None:
        take_time(options.target_ms * slow, claim.item, options.jitter)
        claim.slot.fill_(claim.item % 251)
        sender.send(claim, num_bytes=options.slot_bytes, num_tokens=1, digest=claim.item)
        count += 1
        if count == WARM_UP_ITEMS:
            before = memory_mib(world.device)
    sender.drain()
    return {"items": count, "grown_mib": max(0.0, memory_mib(world.device) - before)}


def receive_items(
    world: World, control: Control, schedule: Schedule, options: StreamOptions
) -> dict:
    """A drafter's program."""
    receiver = FeatureReceiver(
        world, control, schedule, num_slots=3, slot_bytes=options.slot_bytes, dtype="uint8"
    )
    count, begin, before = 0, time.perf_counter(), inf
    while (received := receiver.receive()) is not None:
        assert bool((received.slot == received.item % 251).all()), "wrong bytes"
        receiver.release(received)
        take_time(options.drafter_ms, -1 - received.item, options.jitter)
        # Who meets: the drafter ranks, once an item, as DDP does.
        dist.all_reduce(torch.ones(1, device=world.device), group=world.drafter_group)
        count += 1
        if count == WARM_UP_ITEMS:
            begin, before = time.perf_counter(), memory_mib(world.device)
    elapsed = time.perf_counter() - begin
    grown = max(0.0, memory_mib(world.device) - before)
    receiver.close()
    rate = (count - WARM_UP_ITEMS) / elapsed
    return {"items": count, "items_per_s": rate, "grown_mib": grown}


def main() -> None:
    """A rank's program."""
    options = options_of_rank(StreamOptions)
    num_drafters = options.drafters
    world, control = join(options.targets, num_drafters, lane_ctas=4)
    schedule = Schedule(
        steps=options.items // num_drafters,
        batches_per_step=num_drafters,
        num_drafters=num_drafters,
    )
    act = send_items if world.rank in world.topology.target_ranks else receive_items
    report(world.rank, act(world, control, schedule, options))
    leave(world, control)


if __name__ == "__main__":
    main()
