"""One lane: how fast it moves bytes, what memory it takes, and what it takes from compute on either side.

rank 0, the target      captures features of a workload   ==bytes==>   rank 1, the drafter   trains on the workload
"""

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_ddp.bench.drafter import workload_drafter
from dflash_ddp.bench.measure import GIB, milliseconds
from dflash_ddp.bench.ranks import join, leave, meet, options_of_rank, report, run_ranks
from dflash_ddp.bench.target import TargetBench
from dflash_ddp.bench.workloads import WORKLOADS
from dflash_ddp.config import LossConfig
from dflash_ddp.control import Control
from dflash_ddp.lanes import Mover
from dflash_ddp.world import World, open_lane

LANE = (0, 1)
POLL_S = 20e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneOptions:
    """What is moved, and beside what."""

    workload: str = "none"
    """Of the compute that transfers of the first lane disturb; none: transfers only."""
    gib: list[float] = field(default_factory=lambda: [1.0])
    """Payloads of a transfer, GiB."""
    ctas: list[str] = field(default_factory=lambda: ["4", "1", "2", "8", "default"])
    """GPU thread blocks of a lane; default leaves them to NCCL."""
    repeats: int = 5
    """Transfers, and steps of compute, that count."""


def bench_lane(options: LaneOptions) -> dict[str, Any]:
    """One row, with an entry in `lanes` for each pair of payload and thread blocks."""
    target, drafter = run_ranks("dflash_ddp.bench.lane", options, num_ranks=2)
    for there, here in zip(target["lanes"], drafter["lanes"], strict=True):
        here["target_mib"], here["drafter_mib"] = there.pop("mib"), here.pop("mib")
    slowdowns = {
        f"{name}_{key}": side[key]
        for name, side in (("target", target), ("drafter", drafter))
        for key in side
        if key != "lanes"
    }
    return {"lanes": drafter["lanes"]} | slowdowns


def move(mover: Mover, buffer: torch.Tensor, count: int) -> None:
    """So many transfers, one after the other."""
    for _ in range(count):
        transfer = mover.post(buffer, LANE)
        while not mover.finished(transfer):
            time.sleep(POLL_S)


def own_milliseconds(step: Callable[[], Any], world: World) -> float:
    """As `milliseconds`, but waits for the step's stream alone: transfers go on beside it."""
    if world.device.type != "cuda":
        return milliseconds(step, world.device)
    stream = torch.cuda.current_stream(world.device)
    stream.synchronize()
    start = time.perf_counter()
    step()
    stream.synchronize()
    return (time.perf_counter() - start) * 1e3


def slowdown(
    step: Callable[[], Any], world: World, buffer: torch.Tensor, *, transfer_ms: float, repeats: int
) -> dict[str, float]:
    """A step's time alone, and while transfers run all the time."""
    for _ in range(3):
        step()
    meet()
    alone = [own_milliseconds(step, world) for _ in range(repeats)]
    longest = max(value for (value,) in meet(sum(alone)))
    count = math.ceil(1.3 * longest / transfer_ms) + 1
    mover_thread = threading.Thread(
        target=lambda: move(Mover(world), buffer, count), name="mover", daemon=True
    )
    meet()
    mover_thread.start()
    busy = [own_milliseconds(step, world) for _ in range(repeats)]
    still_moving = mover_thread.is_alive()
    mover_thread.join()
    meet()
    ratio = statistics.median(busy) / statistics.median(alone)
    found = {
        "step_alone_ms": round(statistics.median(alone), 2),
        "step_while_moving_ms": round(statistics.median(busy), 2),
        "slowdown": round(ratio - 1, 4),
    }
    return found if still_moving else found | {"transfers_ended_early": 1.0}


def compute_step(name: str, world: World) -> Callable[[], Any]:
    """The workload's step of this rank's role."""
    work = WORKLOADS[name]
    if world.rank == LANE[0]:
        return TargetBench(work, world.device).capture
    bench = workload_drafter(work, world.device, LossConfig())

    def step() -> None:
        bench.forward_backward()
        bench.forget()

    return step


def measure_lane(world: World, buffer: torch.Tensor, *, repeats: int) -> dict[str, float]:
    """Milliseconds of a transfer of the whole buffer, both sides ready, and its rate."""
    mover, times = Mover(world), []
    move(mover, buffer, 2)
    for _ in range(repeats):
        meet()
        start = time.perf_counter()
        move(mover, buffer, 1)
        times.append((time.perf_counter() - start) * 1e3)
    median = statistics.median(times)
    return {"ms": round(median, 2), "gb_per_s": round(len(buffer) / median / 1e6, 1)}


def taken_mib() -> int:
    """GPU memory in use outside of torch's allocator, MiB; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) // 2**20


def run_rank(options: LaneOptions) -> tuple[World, Control, dict[str, Any]]:
    """Measure as one of the two ranks."""
    world, control = join(1, 1, lane_ctas=_ctas(options.ctas[0]))
    cuda, first = world.device.type == "cuda", world.lanes[LANE]
    lanes: list[dict[str, Any]] = []
    buffer = torch.empty(int(max(options.gib) * GIB), dtype=torch.uint8, device=world.device)
    buffer.random_(0, 256)
    for ctas in options.ctas:
        before = taken_mib()
        world.lanes[LANE] = open_lane(LANE, cuda=cuda, lane_ctas=_ctas(ctas))
        for gib in options.gib:
            payload = buffer[: int(gib * GIB)]
            measured = measure_lane(world, payload, repeats=options.repeats)
            mib = taken_mib() - before
            lanes.append({"ctas": ctas, "gib": gib, **measured, "mib": mib})
    row: dict[str, Any] = {"lanes": lanes}
    if options.workload != "none":
        world.lanes[LANE] = first
        step = compute_step(options.workload, world)
        ((transfer_ms,), _) = meet(lanes[len(options.gib) - 1]["ms"])
        row |= slowdown(step, world, payload, transfer_ms=transfer_ms, repeats=options.repeats)
    return world, control, row


def _ctas(text: str) -> int | None:
    return None if text == "default" else int(text)


def main() -> None:
    """A rank's program."""
    options = options_of_rank(LaneOptions)
    world, control, row = run_rank(options)
    report(world.rank, row)
    leave(world, control)


if __name__ == "__main__":
    main()
