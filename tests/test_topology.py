"""Roles and lanes from numbers, and the texts for people when they do not fit."""

import dataclasses
import os

import pytest

from dflash_ddp.config import ConfigError, SplitConfig
from dflash_ddp.world import Topology, own_gpu, plan_topology, read_launch, set_gpu_variables


def plan(targets, drafters, world, local=None, colocated=False) -> Topology:
    launch = dataclasses.replace(read_launch({}), world_size=world, local_world_size=local or world)
    return plan_topology(
        SplitConfig(targets=targets, drafters=drafters, colocated=colocated), launch
    )


def test_one_node_targets_come_first():
    topology = plan(5, 3, 8)
    assert topology.target_ranks == (0, 1, 2, 3, 4)
    assert topology.drafter_ranks == (5, 6, 7)
    assert len(topology.lanes) == 15
    assert topology.lanes[:4] == ((0, 5), (0, 6), (0, 7), (1, 5))
    assert [topology.role(r) for r in (4, 5)] == ["target", "drafter"]
    assert topology.describe(7) == "rank 7 (drafter)"
    assert [r for r in range(8) if topology.speaks(r)] == [0, 5]


@pytest.mark.parametrize(
    ("targets", "drafters", "world", "local", "drafter_ranks"),
    [
        (10, 6, 16, 8, (5, 6, 7, 13, 14, 15)),
        (13, 3, 16, 8, (6, 7, 15)),
        (15, 1, 16, 8, (7,)),
        (1, 3, 4, 2, (0, 1, 3)),
        (1, 1, 2, 1, (0,)),
    ],
)
def test_nodes_share_the_drafters(targets, drafters, world, local, drafter_ranks):
    topology = plan(targets, drafters, world, local)
    assert topology.drafter_ranks == drafter_ranks
    assert sorted(topology.target_ranks + topology.drafter_ranks) == list(range(world))


@pytest.mark.parametrize("world", range(2, 9))
def test_every_rank_has_one_role(world):
    for drafters in range(1, world):
        topology = plan(world - drafters, drafters, world)
        assert topology.world_size == world
        assert set(topology.target_ranks).isdisjoint(topology.drafter_ranks)
        assert len(topology.lanes) == drafters * (world - drafters)


def test_colocated_has_no_lanes():
    topology = plan(2, 2, 2, colocated=True)
    assert topology.target_ranks == topology.drafter_ranks == (0, 1)
    assert topology.lanes == ()
    assert topology.world_size == 2
    assert topology.role(1) == "colocated"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (5, 3, 3),
            "split asks for 5 target + 3 drafter ranks = 8 processes, torchrun started 3; use "
            "split.targets=2 split.drafters=1, or start 8",
        ),
        ((5, 3, 1), "torchrun started 1; use split=colocated, or start 8"),
        ((1, 7, 2), "use split.targets=1 split.drafters=1, or start 8"),
        ((5, 3, 16, 8), "split.drafters=6, or start 8"),
        ((4, 3, 16, 8), "started 16; use split.targets=9 split.drafters=7"),
        ((0, 2, 2), "split.targets=0 split.drafters=2: each role needs one rank or more"),
        ((3, 3, 6, 4), "6 processes do not fill nodes of 4"),
        ((2, 2, 3, 3, True), "use split.targets=3 split.drafters=3"),
    ],
)
def test_misfit_says_what_to_change(arguments, text):
    with pytest.raises(ValueError) as error:
        plan(*arguments)
    assert text in str(error.value)


def test_launch_without_torchrun_is_one_process():
    launch = read_launch({})
    assert (launch.rank, launch.world_size, launch.hosts_store) == (0, 1, True)


def test_launch_reads_torchrun():
    env = {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "abc",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    launch = read_launch(env)
    assert (launch.rank, launch.local_rank, launch.restart_count) == (9, 1, 2)
    assert not launch.hosts_store
    assert read_launch(env | {"RANK": "0"}).hosts_store is False
    assert read_launch(env | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}).hosts_store
    with pytest.raises(ValueError, match="MASTER_ADDR MASTER_PORT is not: start with torchrun"):
        read_launch({k: v for k, v in env.items() if not k.startswith("MASTER")})


def test_what_cuda_reads_once_is_set_and_the_users_choice_stays(monkeypatch):
    launch = read_launch({})
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_gpu_variables(launch)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    set_gpu_variables(launch)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        (None, 3, "3"),
        ("", 0, "0"),
        ("4,5, 6,7", 2, "6"),
        ("GPU-1f,MIG-2e,GPU-3d,GPU-4c", 1, "MIG-2e"),
    ],
)
def test_a_rank_sees_its_own_gpu_only(visible, local_rank, expected):
    launch = dataclasses.replace(read_launch({}), local_rank=local_rank, local_world_size=4)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert own_gpu(launch, 4, env) == expected


def test_more_ranks_than_gpus_are_refused():
    launch = dataclasses.replace(read_launch({}), local_world_size=8)
    with pytest.raises(ConfigError, match="8 ranks on this node, but 4 GPUs are visible"):
        own_gpu(launch, 4, {})
