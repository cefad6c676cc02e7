"""The control plane: who is told what when a rank ends, and the order at start and at the end."""

import logging
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, is_preloaded, report, run_ranks

import dflash_ddp.control
from dflash_ddp.config import SplitConfig
from dflash_ddp.control import Control
from dflash_ddp.log import exit_on_error, setup_logging
from dflash_ddp.jobstore import JobStore
from dflash_ddp.world import close_world, init_world, plan_topology, read_launch


def start(
    rank: int,
    *,
    extra_ranks: int = 0,
    heartbeat_s: float = 20.0,
    start_s: float = 20.0,
    nodes_of_one: bool = False,
):
    """Store and control plane, as a program opens them first; all but the last are targets."""
    launch = read_launch()
    world_size = launch.world_size + extra_ranks
    launch = replace(launch, world_size=world_size, local_world_size=world_size)
    store = JobStore(launch)
    topology = plan_topology(SplitConfig(targets=world_size - 1, drafters=1), launch)
    setup_logging(rank=rank, role=topology.role(rank), verbose=topology.speaks(rank))
    if nodes_of_one:  # as if nobody could see the processes of the others
        launch = replace(launch, local_world_size=1)
    control = Control(
        store, launch, topology, heartbeat_timeout_s=heartbeat_s, start_timeout_s=start_s
    )
    return launch, store, topology, control


def finish(control: Control) -> None:
    control.done()
    control.wait_all_done()
    control.close()


def first_cause(outcome: Outcome) -> str:
    return outcome.output.partition("the job ends: ")[2].partition("\n")[0]


def prepare_slowly(rank: int) -> str:
    """Rank 0 takes longer than any limit; the others wait, because its heart beats."""
    _, _, _, control = start(rank, heartbeat_s=3, start_s=3)
    if rank == 0:
        control.phase("prepare data")
        time.sleep(4.5)
        control.publish("data", "12 shards")
    text = control.wait_for("data", "rank 0 to prepare the data")
    finish(control)
    return text


@pytest.mark.dist
def test_waiting_for_slow_work_has_no_limit():
    outcomes = run_ranks(prepare_slowly, 3)
    assert [outcome.value for outcome in outcomes] == ["12 shards"] * 3


def fail_all_at_once(rank: int) -> None:
    _, _, _, control = start(rank)
    with exit_on_error(control.fail):
        control.phase("load the model")
        control.publish(f"here{rank}")
        for other in range(3):
            control.wait_for(f"here{other}", "the others")
        raise ValueError(f"reason of rank {rank}")


@pytest.mark.dist
@pytest.mark.parametrize("store_in_rank0", [False, True])
def test_first_cause_wins_and_nobody_prints_another(store_in_rank0):
    outcomes = run_ranks(fail_all_at_once, 3, check=False, store_in_rank0=store_in_rank0)
    causes = {first_cause(outcome) for outcome in outcomes} - {""}
    assert len(causes) == 1, report(outcomes)
    pattern = r"rank \d \(\w+\) failed in phase 'load the model': ValueError: reason of rank \d"
    assert re.fullmatch(pattern, causes.pop()), report(outcomes)
    assert {outcome.exit_code for outcome in outcomes} == {13}


def one_fails(rank: int, how: str) -> None:
    _, _, _, control = start(rank)
    with exit_on_error(control.fail):
        control.before_exit(lambda: logging.getLogger("dflash_ddp").warning("log is flushed"))
        control.publish(f"here{rank}")
        if rank == 0:
            for other in (1, 2):
                control.wait_for(f"here{other}", "the others")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "ctrl-c":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            raise OSError("disk full")
        control.wait_for("never", "rank 0")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "rank 0 (target) failed in phase 'start': OSError: disk full"),
        ("ctrl-c", "rank 0 (target) failed in phase 'start': interrupted (Ctrl-C)"),
        ("kill", "lost the job's store"),
    ],
)
def test_end_of_the_rank_that_holds_the_store(how, cause):
    outcomes = run_ranks(one_fails, 3, how, check=False, store_in_rank0=True)
    for outcome in outcomes[1:] if how == "kill" else outcomes:
        # Rank 1 speaks for no role: it prints what it finds itself, and leaves the rest to them.
        silent = outcome.rank == 1 and how != "kill"
        assert cause in first_cause(outcome) or silent, report(outcomes)
        assert outcome.exit_code == 13
        assert outcome.ended_at < outcomes[0].ended_at + 10
        assert "log is flushed" in outcome.output


def wait_for_a_rank_that_never_starts(rank: int) -> None:
    _, _, _, control = start(rank, extra_ranks=1, start_s=3)
    with exit_on_error(control.fail):
        control.wait_for("never", "rank 2")


@pytest.mark.dist
def test_rank_that_never_starts_is_named():
    outcomes = run_ranks(wait_for_a_rank_that_never_starts, 2, check=False)
    expected = "rank 2 (drafter) has no heartbeat for 3 s (it never started)"
    assert expected in first_cause(outcomes[0]), report(outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [13, 13]


def lose_a_peer_in_a_collective(rank: int) -> None:
    launch, store, topology, control = start(rank, nodes_of_one=True)
    with exit_on_error(control.fail):
        init_world(topology, launch, store, device_type="cpu")
        if rank == 1:
            time.sleep(1.5)
            os._exit(0)
        dist.all_reduce(torch.ones(1))


@pytest.mark.dist
def test_broken_collective_names_the_silent_rank():
    outcomes = run_ranks(lose_a_peer_in_a_collective, 3, check=False)
    for outcome in (outcomes[0], outcomes[2]):
        assert "no heartbeat from: rank 1 (target)" in first_cause(outcome), report(outcomes)
        assert outcome.ended_at < outcomes[1].ended_at + 10


def tickets(rank: int) -> list[int]:
    _, _, _, control = start(rank)
    with ThreadPoolExecutor(8) as threads:  # all of them on the one connection of the rank
        mine = list(threads.map(lambda _: control.claim(), range(20)))
    finish(control)
    return mine


@pytest.mark.dist
@pytest.mark.parametrize("store_in_rank0", [False, True])
def test_tickets_are_unique(store_in_rank0):
    outcomes = run_ranks(tickets, 3, store_in_rank0=store_in_rank0)
    claimed = [ticket for outcome in outcomes for ticket in outcome.value]
    assert sorted(claimed) == list(range(60))


def leave_late(rank: int) -> None:
    """The host of the store does not wait for the others, who take longer than any limit to leave."""
    dflash_ddp.control._LEAVE_S = 0.1
    _, _, _, control = start(rank, heartbeat_s=3)
    with exit_on_error(control.fail):
        control.done()
        control.wait_all_done()
        time.sleep(5 if rank else 0)  # `close_world`
        control.close()


@pytest.mark.dist
def test_the_store_may_go_when_all_are_done():
    outcomes = run_ranks(leave_late, 3, store_in_rank0=True)
    assert outcomes[1].ended_at > outcomes[0].ended_at + 3
    assert not any("the job ends" in outcome.output for outcome in outcomes)


def test_a_port_that_is_taken_is_named():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    with pytest.raises(dist.DistError, match=rf"port: {server.port}\b.*address already in use"):
        JobStore(read_launch(env))


def one_process(rank: int) -> tuple:
    """No torchrun: one process that is target and drafter."""
    del os.environ["RANK"]
    launch = read_launch()
    store = JobStore(launch)
    topology = plan_topology(SplitConfig(targets=1, drafters=1, colocated=True), launch)
    control = Control(store, launch, topology)
    world = init_world(topology, launch, store, device_type="cpu")
    dist.all_reduce(torch.ones(1), group=world.drafter_group)
    result = (world.lanes, control.claim(), control.claim())
    control.done()
    control.wait_all_done()
    close_world(world)
    control.close()
    return result


@pytest.mark.dist
def test_one_process_without_torchrun():
    assert run_ranks(one_process, 1)[0].value == ({}, 0, 1)



def test_ranks_start_with_the_package_imported():
    """Else each would import it for itself, for seconds, in every test here."""
    assert [outcome.value for outcome in run_ranks(is_preloaded, 2, "training")] == [True, True]


def test_error_without_peers_is_printed_and_exits_with_1(caplog):
    with pytest.raises(SystemExit) as exit_, exit_on_error():
        raise ValueError("bad configuration")
    assert exit_.value.code == 1
    assert caplog.text.count("bad configuration\nTraceback") == 1


def test_error_is_published_once_there_are_peers():
    published: list[BaseException] = []

    def program() -> None:
        with exit_on_error() as handler:
            handler.publish = published.append
            raise ValueError("late")

    with pytest.raises(SystemExit):
        program()
    assert [str(error) for error in published] == ["late"]


@pytest.mark.parametrize("code", [None, 0])
def test_clean_exit_passes(code):
    with pytest.raises(SystemExit) as exit_, exit_on_error(pytest.fail):
        raise SystemExit(code)
    assert exit_.value.code == code


def test_ctrl_c_exits_with_130():
    with pytest.raises(SystemExit) as exit_, exit_on_error():
        raise KeyboardInterrupt
    assert exit_.value.code == 130
