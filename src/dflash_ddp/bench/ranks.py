"""Benchmarks of several ranks: start them under torchrun, meet, and bring back what each has measured."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflash_ddp.config import SplitConfig
from dflash_ddp.control import Control
from dflash_ddp.jobstore import JobStore
from dflash_ddp.settings import Options
from dflash_ddp.world import (
    World,
    close_world,
    init_world,
    plan_topology,
    read_launch,
    set_gpu_variables,
)

HEARTBEAT_TIMEOUT_S = 60.0
LIMIT_S = 540.0


def run_ranks(module: str, options: Any, *, num_ranks: int) -> list[dict[str, Any]]:
    """Run `python -m module '<options>' <folder>` on `num_ranks` ranks; what each gave to `report`.

    `options` is a dataclass of plain values.

    Raises:
        SystemExit: a rank failed; its own words are on the screen.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(num_ranks), "-m", module]
        command += [json.dumps(asdict(options)), folder]
        done = subprocess.run(command, check=False, timeout=LIMIT_S, stdout=sys.stderr)
        if done.returncode:
            raise SystemExit(done.returncode)
        return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(num_ranks)]


def options_of_rank(schema: type[Options]) -> Options:
    """What `run_ranks` was given."""
    return schema(**json.loads(sys.argv[1]))


def report(rank: int, row: dict[str, Any]) -> None:
    """Give the parent what this rank has measured."""
    (Path(sys.argv[2]) / f"{rank}.json").write_text(json.dumps(row))


def join(num_targets: int, num_drafters: int, *, lane_ctas: int | None) -> tuple[World, Control]:
    """Become a rank of a job that has this split, as training does."""
    launch = read_launch()
    topology = plan_topology(SplitConfig(targets=num_targets, drafters=num_drafters), launch)
    store = JobStore(launch)
    control = Control(store, launch, topology, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    num_gpus = torch.cuda.device_count()  # wakes no GPU
    share_gpu = 0 < num_gpus < launch.world_size
    set_gpu_variables(launch, share_gpu=share_gpu)
    world = init_world(
        topology,
        launch,
        store,
        device_type="cuda" if num_gpus else "cpu",
        share_gpu=share_gpu,
        lane_ctas=lane_ctas,
    )
    return world, control


def leave(world: World, control: Control) -> None:
    """End when everybody has."""
    control.done()
    control.wait_all_done()
    close_world(world)
    control.close()


def meet(*values: float) -> list[list[float]]:
    """Wait for all ranks; the values that each has brought."""
    mine = torch.tensor(values or (0.0,), dtype=torch.float64)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    # Who meets: all ranks of the benchmark, over gloo.
    dist.all_gather(everybody, mine)
    return [value.tolist() for value in everybody]
