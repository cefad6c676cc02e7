"""One lane: how fast it moves bytes, what memory it takes, and what it takes from compute on either side.

rank 0, the target      captures features of a workload   ==bytes==>   rank 1, the drafter   trains on the workload
"""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from dflash_ddp.bench.drafter import DrafterBench
from dflash_ddp.bench.measure import GIB, milliseconds
from dflash_ddp.bench.ranks import join, meet, options_of_rank, report, run_ranks
from dflash_ddp.bench.target import TargetBench
from dflash_ddp.bench.workloads import WORKLOADS
from dflash_ddp.config import Recompute
from dflash_ddp.control import Control
from dflash_ddp.lanes import Mover
from dflash_ddp.world import World, close_world

LANE = (0, 1)
POLL_S = 20e-6


def bench_lane(gib: float, *, ctas: str, workload: str, repeats: int) -> dict[str, Any]:
    """One row.

    Args:
        gib: payload of a transfer, GiB.
        ctas: GPU thread blocks of a transfer; "default" leaves them to NCCL.
        workload: of the compute that a transfer disturbs; "none" measures transfers only.
        repeats: transfers, and steps of compute, that count.
    """
    options = {"gib": gib, "ctas": ctas, "workload": workload, "repeats": repeats}
    target, drafter = run_ranks("dflash_ddp.bench.lane", options, num_ranks=2)
    row = {key: drafter[key] for key in ("ms", "gb_per_s")}
    for name, side in (("target", target), ("drafter", drafter)):
        row |= {f"{name}_{key}": side[key] for key in side if key not in row}
    return row


def move(mover: Mover, buffer: torch.Tensor, count: int) -> None:
    """So many transfers, one after the other."""
    for _ in range(count):
        transfer = mover.post(buffer, LANE)
        while not mover.finished(transfer):
            time.sleep(POLL_S)


def slowdown(
    step: Callable[[], Any], world: World, buffer: torch.Tensor, *, transfer_ms: float, repeats: int
) -> dict[str, float]:
    """A step's time alone, and while transfers run all the time."""
    for _ in range(3):
        step()
    meet()
    alone = [milliseconds(step, world.device) for _ in range(repeats)]
    longest = max(value for (value,) in meet(sum(alone)))
    count = math.ceil(1.3 * longest / transfer_ms) + 1
    mover_thread = threading.Thread(
        target=lambda: move(Mover(world), buffer, count), name="mover", daemon=True
    )
    meet()
    mover_thread.start()
    busy = [milliseconds(step, world.device) for _ in range(repeats)]
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
    bench = DrafterBench(work, world.device, chunk_rows=4096, recompute=Recompute.auto)

    def step() -> None:
        bench.forward_backward()
        bench.forget()

    return step


def run_rank(options: dict[str, Any]) -> tuple[World, Control, dict[str, Any]]:
    """Measure as one of the two ranks."""
    cuda = torch.cuda.is_available()
    free_before = 0
    if cuda:  # the CUDA context is not the lane's; what CUDA reads once is set before
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
        free_before = torch.cuda.mem_get_info()[0]
    ctas = None if options["ctas"] == "default" else int(options["ctas"])
    world, control = join(1, 1, lane_ctas=ctas)
    buffer = torch.empty(int(options["gib"] * GIB), dtype=torch.uint8, device=world.device)
    buffer.random_(0, 256)
    mover = Mover(world)
    move(mover, buffer, 2)
    times = []
    for _ in range(options["repeats"]):
        meet()
        start = time.perf_counter()
        move(mover, buffer, 1)
        times.append((time.perf_counter() - start) * 1e3)
    median = statistics.median(times)
    row = {"ms": round(median, 2), "gb_per_s": round(len(buffer) / median / 1e6, 1)}
    if cuda:
        lost = free_before - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        row["lane_mib"] = round(lost / 2**20)
    if options["workload"] != "none":
        step = compute_step(options["workload"], world)
        (transfer_ms,) = meet(median)[LANE[1]]
        row |= slowdown(step, world, buffer, transfer_ms=transfer_ms, repeats=options["repeats"])
    return world, control, row


def main() -> None:
    """A rank's program."""
    options = options_of_rank()
    world, control, row = run_rank(options)
    report(options, world.rank, row)
    control.done()
    control.wait_all_done()
    close_world(world)
    control.close()


if __name__ == "__main__":
    main()
