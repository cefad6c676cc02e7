"""Who does what: roles from ranks, the job's store, and the live process groups.

In: the variables that torchrun sets, and the settings of `split`. Out, in the order of a run:

    launch = read_launch()                   this process among the others
    topology = plan_topology(split, launch)  pure: target ranks, drafter ranks, lanes
    store = JobStore(launch)                 the job's TCPStore, before any slow work
    world = init_world(topology, ...)        device, drafter group (for DDP), this rank's lanes
    close_world(world)                       on the good path only, after everybody is done

A lane is one (target rank, drafter rank) pair with a communicator of its own, so that no lane
waits for another: 5 targets and 3 drafters have 15. Two nodes of four with split 5:3 look so:

    node 0: T T D D  (ranks 0 1 2 3)        node 1: T T T D  (ranks 4 5 6 7)

Invariant: every rank makes the same groups in the same order (torch names them by counting).
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflash_ddp.config import ConfigError, SplitConfig

if TYPE_CHECKING:  # it knows launches
    from dflash_ddp.jobstore import JobStore

logger = logging.getLogger(__name__)

# Limits of the groups. They find a hung GPU; the heartbeats find a dead or frozen process.
START_LIMIT = timedelta(minutes=10)  # making the groups, and reaching the store
LANE_LIMIT = timedelta(minutes=5)  # one transfer; it starts when both sides are ready
DRAFTERS_LIMIT = timedelta(minutes=10)  # one collective; covers a checkpoint that others wait for


@dataclass(frozen=True, slots=True)
class Topology:
    """The roles of all ranks. Colocated: every rank has both roles, and there are no lanes."""

    target_ranks: tuple[int, ...]
    drafter_ranks: tuple[int, ...]
    colocated: bool

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return len({*self.target_ranks, *self.drafter_ranks})

    @property
    def lanes(self) -> tuple[tuple[int, int], ...]:
        """(target rank, drafter rank) of each lane, in the one order that all ranks use."""
        if self.colocated:
            return ()
        return tuple((t, d) for t in self.target_ranks for d in self.drafter_ranks)

    def role(self, rank: int) -> str:
        """Name the role of a rank: "target", "drafter" or "colocated"."""
        if self.colocated:
            return "colocated"
        return "target" if rank in self.target_ranks else "drafter"

    def describe(self, rank: int) -> str:
        """Name a rank for people: "rank 2 (drafter)"."""
        return f"rank {rank} ({self.role(rank)})"

    def speaks(self, rank: int) -> bool:
        """Tell whether this rank is the first of its role: the one whose INFO lines are shown."""
        return rank in (self.target_ranks[0], self.drafter_ranks[0])


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    run_id: str
    restart_count: int
    store_host: str
    store_port: int
    hosts_store: bool
    """No agent holds the store, this process must."""


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """Read torchrun's variables; without them this is a job of one process with its own store.

    Raises:
        ValueError: RANK is set but other variables of a launcher are missing.
    """
    if "RANK" not in env:
        return Launch(0, 0, 1, 1, "local", 0, "127.0.0.1", 0, hosts_store=True)
    needed = ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in needed if name not in env]:
        raise ValueError(f"RANK is set but {' '.join(missing)} is not: start with torchrun")
    return Launch(
        rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_world_size=int(env["LOCAL_WORLD_SIZE"]),
        run_id=env.get("TORCHELASTIC_RUN_ID", "none"),
        restart_count=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        store_host=env["MASTER_ADDR"],
        store_port=int(env["MASTER_PORT"]),
        hosts_store=env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def plan_topology(split: SplitConfig, launch: Launch) -> Topology:
    """Give each rank its role. Pure: every rank computes the same.

    One node: targets first, then drafters. Several nodes: drafters spread evenly (the first nodes
    take one more where it does not divide), on the last local ranks of each node.

    Raises:
        ValueError: split and processes do not fit; the text says what to change.
    """
    num_targets, num_drafters, world_size = split.targets, split.drafters, launch.world_size
    num_nodes, rest = divmod(world_size, launch.local_world_size)
    if rest:
        raise ValueError(
            f"{world_size} processes do not fill nodes of {launch.local_world_size}: start the same "
            f"--nproc_per_node on every node"
        )
    if split.colocated:
        if not num_targets == num_drafters == world_size:
            raise ValueError(
                f"split.colocated=true gives every rank both roles, but torchrun started "
                f"{world_size} for split.targets={num_targets} split.drafters={num_drafters}; "
                f"use split.targets={world_size} split.drafters={world_size}"
            )
        return Topology(tuple(range(world_size)), tuple(range(world_size)), colocated=True)
    if num_targets < 1 or num_drafters < 1:
        raise ValueError(
            f"split.targets={num_targets} split.drafters={num_drafters}: each role needs one rank "
            f"or more; one process alone can run split=colocated"
        )
    if (wanted := num_targets + num_drafters) != world_size:
        drafters = min(max(1, round(world_size * num_drafters / wanted)), world_size - 1)
        proposal = f"split.targets={world_size - drafters} split.drafters={drafters}"
        raise ValueError(
            f"split asks for {num_targets} target + {num_drafters} drafter ranks = {wanted} "
            f"processes, torchrun started {world_size}; use "
            f"{proposal if drafters else 'split=colocated'}, or start {wanted}"
        )
    drafter_ranks: list[int] = []
    for node in range(num_nodes):
        num_here = num_drafters // num_nodes + (node < num_drafters % num_nodes)
        node_end = (node + 1) * launch.local_world_size
        drafter_ranks += range(node_end - num_here, node_end)
    target_ranks = tuple(r for r in range(world_size) if r not in drafter_ranks)
    return Topology(target_ranks, tuple(drafter_ranks), colocated=False)


@dataclass(slots=True)
class World:
    """The live job as this rank sees it."""

    rank: int
    device: torch.device
    topology: Topology
    drafter_group: dist.ProcessGroup | None = None
    """All drafter ranks, for DDP; None on a rank that is not one."""
    lanes: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    """(target rank, drafter rank) -> group of two; only the lanes of this rank."""


def init_world(
    topology: Topology,
    launch: Launch,
    store: "JobStore",
    *,
    device_type: str,
    share_gpu: bool = False,
    lane_ctas: int | None = 4,
) -> World:
    """Bind the device, make the groups, connect the lanes. All ranks of the job meet here.

    On GPUs call `set_gpu_variables` first.

    Args:
        topology, launch: the plan, equal on all ranks, and this process.
        store: the job's store.
        device_type: "cuda" (NCCL, and gloo for tensors in host memory) or "cpu" (gloo).
        share_gpu: several ranks may use one GPU. For tests: NCCL then takes slow sockets.
        lane_ctas: thread blocks that one transfer may take from the GPU; None: NCCL decides.
    """
    cuda = device_type == "cuda"
    device = _bind_gpu(launch, share_gpu) if cuda else torch.device("cpu")
    # Who meets: all ranks. No device_id: groups stay lazy, and new_group is no collective split.
    # A rank that does not come is named by the heartbeats, or ends this call after the limit.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store.groups,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=START_LIMIT,
    )
    world = World(launch.rank, device, topology)
    # Who meets: all ranks, members or not, here and for each lane, in one order; else as above.
    # new_group does not inherit the timeout of the default group.
    group = dist.new_group(list(topology.drafter_ranks), timeout=DRAFTERS_LIMIT)
    world.drafter_group = group if launch.rank in topology.drafter_ranks else None
    for lane in topology.lanes:
        group = open_lane(lane, cuda=cuda, lane_ctas=lane_ctas)
        if launch.rank in lane:
            world.lanes[lane] = group
    _warm_up(world)
    return world


def open_lane(lane: tuple[int, int], *, cuda: bool, lane_ctas: int | None) -> dist.ProcessGroup:
    """Make the group of a lane; all ranks of the job call it, also those that are not on the lane."""
    options = None
    if cuda:  # a fresh object for each group: torch changes it
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if lane_ctas is not None:
            options.config.max_ctas = lane_ctas
    backend = "nccl" if cuda else "gloo"
    return dist.new_group(list(lane), timeout=LANE_LIMIT, backend=backend, pg_options=options)


def _warm_up(world: World) -> None:
    """Send one byte over each lane: NCCL connects and allocates now and not while training."""
    byte = torch.zeros(1, dtype=torch.uint8, device=world.device)
    for (target, drafter), group in world.lanes.items():
        # Who meets: the two ranks of the lane. All ranks walk their lanes in one order, so the
        # first lane that is not connected can always go on. If a rank does not come: LANE_LIMIT.
        if world.rank == target:
            dist.send(byte, drafter, group=group)
        else:
            dist.recv(byte, target, group=group)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)


def set_gpu_variables(launch: Launch, *, share_gpu: bool = False) -> None:
    """Set what CUDA and NCCL read once: before anything touches a GPU. What the user has set stays.

    Each process sees its own GPU only, as number 0: PyTorch keys compiled code by that number, so
    that ranks of a node share it, and no library can take memory of another rank's GPU by mistake.

    Raises:
        ConfigError: more local ranks than GPUs.
    """
    # Counted by the management library, where there is one, so that no GPU wakes.
    num_gpus = torch.cuda.device_count()
    if num_gpus and not share_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(launch, num_gpus)
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    if share_gpu:
        # NCCL refuses two ranks of one host on one GPU. With a host name of its own each rank is
        # a node, and traffic goes through sockets of the loopback interface.
        os.environ["NCCL_HOSTID"] = f"rank{launch.rank}"
        wanted |= {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        wanted |= {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
        wanted |= {"RES_OPTIONS": "timeout:1 attempts:1"}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def own_gpu(launch: Launch, num_gpus: int, env: Mapping[str, str] = os.environ) -> str:
    """This rank's one entry of CUDA_VISIBLE_DEVICES, out of the GPUs that are visible to all.

    Raises:
        ConfigError: more local ranks than GPUs.
    """
    if launch.local_world_size > num_gpus:
        raise ConfigError(
            f"{launch.local_world_size} ranks on this node, but {num_gpus} GPUs are visible: start "
            f"fewer (--nproc_per_node), show each process all GPUs of the node if a launcher hides "
            f"them, or device=cpu; split.share_gpu=true is for tests"
        )
    visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[launch.local_rank].strip() if visible != [""] else str(launch.local_rank)


def _bind_gpu(launch: Launch, share_gpu: bool) -> torch.device:
    """Choose this rank's GPU; without `share_gpu` it sees one only."""
    torch.cuda.init()
    seen = torch._C._cuda_getDeviceCount()  # by the driver; torch.cuda's reads the environment
    if seen > 1 and not share_gpu:
        logger.warning("CUDA was awake too early: this rank sees %d GPUs, and compiles alone", seen)
    if launch.rank == 0 and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts transfers and compute into one queue of the GPU: "
            "nothing waits for ever, but transfers wait for compute; unset it (32 is used then)"
        )
    device = torch.device("cuda", launch.local_rank % seen)
    torch.cuda.set_device(device)
    return device


def close_world(world: World) -> None:
    """Leave the groups. Only after everybody is done: after an error the process just exits."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.lanes.clear()
    world.drafter_group = None
    dist.destroy_process_group()
