"""Two nodes: two torchrun agents on this machine, each with a target rank and a drafter rank."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from runs import Running, assert_equal_state, free_port, rows, running, state
from training import train

pytestmark = pytest.mark.dist

STEPS = 300


def overrides(material, name: str) -> list[str]:
    words = [w for w in material.overrides(name) if not w.startswith(("steps=", "eval.every="))]
    split = ["split.targets=2", "split.drafters=2"]
    return [*words, *split, f"steps={STEPS}", "eval.every=0", "eval.at_start=false"]


@contextmanager
def two_nodes(words: list[str]) -> Iterator[list[Running]]:
    """Both agents at work; the first one holds the rendezvous."""
    agent = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_id", "test"]
    agent += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--local_addr", "127.0.0.1"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(2, words, agent=[*agent, f"--rdzv_conf=is_host={host}"]))
            for host in (1, 0)
        ]


def ranks_at(agent: Running) -> list[int]:
    """The ranks that an agent has started so far."""
    return [rank for rank in range(4) if agent.pids(rank=rank)]


def test_an_agent_is_killed_all_end_and_going_on_gives_what_one_node_gives(material):
    """Each node has a target rank and a drafter rank; the killed agent does not hold the store."""
    words = overrides(material, "two nodes")
    metrics = material.output("two nodes") / "metrics.jsonl"
    with two_nodes(words) as agents:
        agents[0].wait_until(
            lambda: metrics.is_file() and metrics.read_text().count("train/loss") >= 6, 240
        )
        os.kill(agents[1].process_id, signal.SIGKILL)
        killed_at = time.monotonic()
        while any(agent.pids() for agent in agents):
            assert time.monotonic() - killed_at < 40, [agent.text() for agent in agents]
            time.sleep(0.1)
        text = "".join(agent.text() for agent in agents)
    assert "the launcher of rank" in text
    assert len(metrics.read_text().splitlines()) < STEPS
    with two_nodes(words) as agents:
        agents[0].wait_until(lambda: sorted(map(ranks_at, agents)) == [[0, 1], [2, 3]], 120)
        ends = [agent.wait(240) for agent in agents]
    assert [end.code for end in ends] == [0, 0], ends
    text = "".join(end.output for end in ends)
    assert "going on from" in text
    assert "[rank 1 drafter]" in text, "each node ends with a drafter rank"
    train(4, overrides(material, "one node"), limit_s=240)
    assert rows(material.output("two nodes")) == rows(material.output("one node"))
    assert_equal_state(*(state(material.output(f"{n}"), STEPS) for n in ("two nodes", "one node")))
