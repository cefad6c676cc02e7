"""The channel over gloo: order, content, credit, end of the stream, and ranks that break."""

import os
import random
import re
import signal
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, report, run_ranks

from dflash_ddp.channel import FeatureReceiver, FeatureSender
from dflash_ddp.config import SplitConfig
from dflash_ddp.control import Control
from dflash_ddp.log import exit_on_error, setup_logging
from dflash_ddp.jobstore import JobStore
from dflash_ddp.world import close_world, init_world, plan_topology, read_launch

SLOT_BYTES = 4096
pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Case:
    """One small run; ranks 0 .. targets-1 are targets."""

    targets: int
    drafters: int
    num_items: int = 24
    pattern: tuple[int, ...] = ()  # drafter of each item, repeated; default: round robin
    sleep_s: float = 0.004  # up to so much on each side and item
    heartbeat_timeout_s: float = 20.0
    num_slots: int = 3
    break_rank: int = -1
    break_how: str = ""
    stop_at: int | None = None


class Pattern:
    """The part of a schedule that the channel uses, with the drafters of a case."""

    def __init__(self, case: Case, num_items: int) -> None:
        pattern = case.pattern or tuple(range(case.drafters))
        self.num_items = num_items
        self.drafter_of = [pattern[i % len(pattern)] for i in range(num_items)]
        self.items = [
            [i for i, drafter in enumerate(self.drafter_of) if drafter == d]
            for d in range(case.drafters)
        ]

    def route(self, item: int) -> tuple[int, int]:
        drafter = self.drafter_of[item]
        return drafter, self.items[drafter].index(item)

    def item_of(self, drafter: int, sequence: int) -> int | None:
        items = self.items[drafter]
        return items[sequence] if sequence < len(items) else None


def features(item: int) -> torch.Tensor:
    """The bytes of an item: another length and content for each."""
    generator = torch.Generator().manual_seed(item)
    num_bytes = 1 + item * 977 % SLOT_BYTES
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def break_now(how: str) -> None:
    if how == "freeze":
        time.sleep(0.5)  # so that its phase is known
    sys.stderr.write(f"breaks at {time.monotonic()}\n")
    sys.stderr.flush()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(9)
    elif how == "raise":
        raise ValueError("the dog ate item 5")


def stream(rank: int, case: Case) -> dict:
    """A whole run as a program does it: set up, stream, leave in order."""
    with exit_on_error() as handler:
        launch = read_launch()
        store = JobStore(launch)
        split = SplitConfig(targets=case.targets, drafters=case.drafters)
        topology = plan_topology(split, launch)
        setup_logging(rank=rank, role=topology.role(rank), verbose=topology.speaks(rank))
        control = Control(store, launch, topology, heartbeat_timeout_s=case.heartbeat_timeout_s)
        handler.publish = control.fail
        world = init_world(topology, launch, store, device_type="cpu")
        if rank in topology.target_ranks:
            result = send_all(rank, world, control, case)
        else:
            result = receive_all(rank, world, control, case)
        control.done()
        control.wait_all_done()
        close_world(world)
        control.close()
    return result


def send_all(rank, world, control, case) -> dict:
    more = {"fewer": -5, "more": 5}.get(case.break_how, 0) if rank == case.break_rank else 0
    schedule = Pattern(case, case.num_items + more)
    if rank == case.break_rank and case.break_how == "route":

        def route(item: int) -> tuple[int, int]:
            raise KeyError(f"no route for item {item}")

        schedule.route = route
    dtype = "float32" if rank == case.break_rank and case.break_how == "dtype" else "bfloat16"
    sender = FeatureSender(
        world, control, schedule, num_slots=2, slot_bytes=2 * SLOT_BYTES, dtype=dtype
    )
    sleeps, items = random.Random(rank), []
    while (claim := sender.acquire()) is not None:
        control.phase(f"forward item {claim.item}")
        if rank == case.break_rank and len(items) == 2:
            break_now(case.break_how)
        time.sleep(sleeps.random() * case.sleep_s)
        payload = features(claim.item)
        if rank == case.break_rank and case.break_how == "large":
            payload = torch.zeros(SLOT_BYTES + 1, dtype=torch.uint8)
        claim.slot[: len(payload)] = payload
        crc = zlib.crc32(payload.numpy())
        sender.send(claim, num_bytes=len(payload), num_tokens=7, digest=crc)
        items.append(claim.item)
    sender.drain()
    return {"items": items, "wait_slot_s": sender.wait_slot_s}


def receive_all(rank, world, control, case) -> dict:
    schedule = Pattern(case, case.num_items)
    if rank == case.break_rank and case.break_how == "schedule":
        right = schedule.route
        schedule.route = lambda item: (1 - right(item)[0], 0)
    receiver = FeatureReceiver(
        world, control, schedule, num_slots=case.num_slots, slot_bytes=SLOT_BYTES, dtype="bfloat16"
    )
    sleeps, items, crcs = random.Random(rank), [], []
    while (received := receiver.receive()) is not None:
        control.phase(f"train item {received.item}")
        if rank == case.break_rank and len(items) == 2:
            break_now(case.break_how)
            if case.break_how == "leave":
                break
        if case.stop_at is not None:
            if received.item >= case.stop_at - 4:
                control.request_stop(case.stop_at)
            # Who meets: the drafter ranks, once an item, as in training.
            dist.all_reduce(torch.ones(1), group=world.drafter_group)
        time.sleep(sleeps.random() * case.sleep_s)
        payload = received.slot[: received.header.num_bytes]
        assert torch.equal(payload, features(received.item))
        assert received.header.digest == zlib.crc32(payload.numpy())
        assert received.header.num_tokens == 7
        assert received.sequence == len(items)
        items.append(received.item)
        crcs.append(zlib.crc32(received.slot[: received.header.num_bytes].numpy()))
        receiver.release(received)
    receiver.close()
    return {"items": items, "crcs": crcs, "wait_s": receiver.wait_s}


def run(case: Case, **options) -> list[Outcome]:
    return run_ranks(stream, case.targets + case.drafters, case, **options)


def assert_delivered(case: Case, outcomes: list[Outcome], end: int) -> None:
    """Every item once, at its drafter, in order; computed once, by some target."""
    values = [outcome.value for outcome in outcomes]
    schedule, wanted = Pattern(case, end), range(end)
    for drafter in range(case.drafters):
        expected = schedule.items[drafter]
        assert values[case.targets + drafter]["items"] == expected
    computed = sorted(item for value in values[: case.targets] for item in value["items"])
    assert len(set(computed)) == len(computed)
    assert set(wanted) <= set(computed)


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_every_item_once_and_in_order(targets, drafters):
    case = Case(targets, drafters)
    assert_delivered(case, run(case), case.num_items)


def test_unequal_numbers_of_items():
    case = Case(2, 2, pattern=(0, 0, 1, 0), num_items=23)
    assert_delivered(case, run(case), case.num_items)


def test_no_items():
    case = Case(2, 1, num_items=0)
    assert_delivered(case, run(case), 0)


def test_fewer_items_than_ranks():
    case = Case(2, 2, num_items=1)
    assert_delivered(case, run(case), 1)


def test_one_slot_is_enough():
    case = Case(2, 2, num_slots=1)
    assert_delivered(case, run(case), case.num_items)


def test_number_of_targets_does_not_change_what_a_drafter_sees():
    one, three = run(Case(1, 1, num_items=30)), run(Case(3, 1, num_items=30))
    assert one[1].value["items"] == three[3].value["items"] == list(range(30))
    assert one[1].value["crcs"] == three[3].value["crcs"]


def test_stop_ends_all_drafters_before_the_same_item():
    case = Case(2, 2, num_items=1000, stop_at=20)
    assert_delivered(case, run(case), 20)


def watch_credit(rank: int, case: Case) -> dict | None:
    """Stream, but look at the store's counters while the drafter sits on its first batch."""
    receive = FeatureReceiver.receive

    def slow(receiver: FeatureReceiver):
        received = receive(receiver)
        if received is not None and received.sequence in (0, 1):
            time.sleep(0.7)
            counters = receiver._control._store
            seen.append((counters.add("count/0", 0), counters.add("ticket", 0)))
        return received

    seen: list[tuple[int, int]] = []
    FeatureReceiver.receive = slow
    result = stream(rank, case)
    return result | {"seen": seen}


def test_targets_never_run_ahead_of_credit():
    case = Case(2, 1, num_items=30, sleep_s=0)
    outcomes = run_ranks(watch_credit, 3, case)
    assert_delivered(case, outcomes, 30)
    # Headers: as many as slots, one more after a release. Claimed besides: 2 send slots a target.
    assert outcomes[2].value["seen"] == [(3, 3 + 4), (4, 4 + 4)]
    assert outcomes[0].value["wait_slot_s"] > 0.5


def assert_all_end_with(outcomes: list[Outcome], texts: list[str], *, but: int = -1):
    """All ranks but one exit with code 13 within 10 s; those that speak print the texts."""
    broke_at = [float(t) for o in outcomes for t in re.findall(r"breaks at ([\d.]+)", o.output)]
    causes = []
    for outcome in outcomes:
        if outcome.rank != but:
            assert outcome.exit_code == 13, report(outcomes)
            assert not broke_at or outcome.ended_at < broke_at[0] + 10, report(outcomes)
            causes.append(outcome.output.partition("the job ends: ")[2])
    assert any(causes), report(outcomes)
    assert all(text in cause for cause in causes if cause for text in texts), report(outcomes)


@pytest.mark.parametrize(("rank", "how"), [(0, "kill"), (3, "exit")])
def test_dead_rank_ends_all_and_is_named(rank, how):
    case = Case(2, 2, 400, break_rank=rank, break_how=how, heartbeat_timeout_s=4)
    outcomes = run(case, check=False)
    role = "target" if rank < 2 else "drafter"
    assert_all_end_with(outcomes, [f"rank {rank} ({role})"], but=rank)
    assert outcomes[rank].exit_code == (9 if how == "exit" else -9)


def test_frozen_rank_ends_all_within_the_heartbeat_limit():
    def freeze(rank: int) -> list[Outcome]:
        case = Case(2, 2, 400, break_rank=rank, break_how="freeze", heartbeat_timeout_s=4)
        return run(case, check=False, may_hang=[rank])

    with ThreadPoolExecutor() as jobs:  # two jobs at once: they mostly wait
        both = list(jobs.map(freeze, (1, 3)))
    for rank, outcomes in zip((1, 3), both, strict=True):
        texts = [f"rank {rank} (", "has no heartbeat for 4 s (last phase '", "item"]
        assert_all_end_with(outcomes, texts, but=rank)


@pytest.mark.parametrize(
    ("targets", "drafters", "rank", "how", "texts"),
    [
        (2, 1, 1, "route", ["rank 1 (target) failed in phase", "no route for item"]),
        (2, 1, 2, "raise", ["rank 2 (drafter) failed", "item 2'", "the dog ate item 5"]),
        (
            2,
            1,
            1,
            "dtype",
            [
                "rank 1 (target) announces item",
                "bytes of float32, but drafter 0 expects 1 to 4096 bytes of bfloat16",
            ],
        ),
        (1, 1, 0, "large", ["announces item 0 with 4097 bytes", "expects 1 to 4096 bytes"]),
        (1, 2, 2, "schedule", ["announces item", "do all ranks have the same schedule?"]),
        (1, 1, 0, "fewer", ["item 19, the next of drafter 0, was never sent"]),
        (1, 1, 0, "more", ["item 24 to drafter 0, whose stream has 24 items: do all ranks have"]),
        (2, 1, 2, "leave", ["drafter 0 closes before item 3"]),
    ],
)
def test_error_in_one_rank_ends_all_with_its_text(targets, drafters, rank, how, texts):
    case = Case(targets, drafters, break_rank=rank, break_how=how)
    assert_all_end_with(run(case, check=False), texts)
